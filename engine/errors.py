"""Every error that Graftwork raises for a person to read.

    GraftworkError               exit code 1, HTTP status 500
    ├── ConfigError              2  400  a setting, a form or a file of settings is wrong
    │   └── Unauthorized         2  401  the call needs a key in force
    ├── BaseModelError           3  500  the base is missing, incomplete or another one
    ├── AdapterError             4  422  an adapter cannot be accepted: format, shape, values
    │   ├── EffectError          4  422  the engine does not reproduce the trainer's log-probabilities
    │   └── DamagedBytes         4  422  its bytes in the store are not those that its checksum was taken of
    ├── NotFound                 5  404  no such policy, revision, suite, key or release; `nearest` names
    ├── Conflict                 6  409  somebody else holds it: a lease, a name, a newer version
    │   ├── Ambiguous            6  409  a prefix that several names share; carries `candidates`
    │   ├── Moved                6  409  bytes that were to be shared lie elsewhere by now
    │   ├── Purged               6  409  rows of policies that were purged; carries `policies`
    │   └── Cancelled            6  409  the operation was called off
    ├── Gone                     1  410  a pinned revision that is served to nobody any more
    └── ServiceError             7  503  a service is down, full, or answered with a fault
        ├── NotRunning           7  503  nothing listens at its address
        ├── PortInUse            7  503
        ├── MissingBytes         7  503  an adapter's bytes are not where its row says, or cannot be read now
        └── Busy                 7  429  full for the moment; carries `retry_after_s` and the queue's state

A message is a full sentence: what is wrong, then what to do. Errors hold strings and numbers
only, so that they cross process borders by pickle.
"""

from collections.abc import Iterable, Mapping


class GraftworkError(Exception):
    exit_code = 1
    status = 500


class ConfigError(GraftworkError):
    exit_code = 2
    status = 400


class Unauthorized(ConfigError):
    status = 401


class BaseModelError(GraftworkError):
    exit_code = 3


class AdapterError(GraftworkError):
    exit_code = 4
    status = 422


class EffectError(AdapterError):
    pass


class DamagedBytes(AdapterError):
    pass


class NotFound(GraftworkError):
    exit_code = 5
    status = 404

    def __init__(self, message: str, nearest: Iterable[str] = ()):
        super().__init__(message)
        self.nearest = tuple(nearest)


class Conflict(GraftworkError):
    exit_code = 6
    status = 409


class Ambiguous(Conflict):
    def __init__(self, message: str, candidates: Iterable[str] = ()):
        super().__init__(message)
        self.candidates = tuple(candidates)


class Purged(Conflict):
    """Some of what was to be published is of policies that were purged; `policies` has their names."""

    def __init__(self, message: str, policies: tuple[str, ...] = ()):
        super().__init__(message)
        self.policies = policies


class Moved(Conflict):
    pass


class Cancelled(Conflict):
    pass


class Gone(GraftworkError):
    """The pinned revision is served to nobody any more; the message is the reason."""

    status = 410


class ServiceError(GraftworkError):
    exit_code = 7
    status = 503


class NotRunning(ServiceError):
    pass


class PortInUse(ServiceError):
    pass


class MissingBytes(ServiceError):
    pass


class Busy(ServiceError):
    status = 429

    def __init__(
        self, message: str, retry_after_s: float = 1.0, queue: Mapping[str, float | str] | None = None
    ):
        super().__init__(message, retry_after_s, queue)
        self.retry_after_s, self.queue = retry_after_s, dict(queue or {})

    def __str__(self) -> str:
        return str(self.args[0])


def of_status(status: int) -> type[GraftworkError]:
    """Return the class that a service's answer with this HTTP status is raised as by its client."""
    named = (ConfigError, Unauthorized, AdapterError, NotFound, Conflict, Gone, Busy)
    otherwise = ConfigError if 400 <= status < 500 else ServiceError
    return next((kind for kind in named if kind.status == status), otherwise)
