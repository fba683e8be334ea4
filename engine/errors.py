"""Every error that Graftwork raises for a person to read.

    GraftworkError               exit code 1
    ├── ConfigError              2  a setting, a form or a file of settings is wrong
    ├── BaseModelError           3  the base is missing, incomplete or another one
    ├── AdapterError             4  an adapter cannot be accepted: format, shape, values
    │   ├── EffectError          4  the engine does not reproduce the trainer's log-probabilities
    │   └── DamagedBytes         4  its bytes in the store are not those that its checksum was taken of
    ├── NotFound                 5  no such policy, revision, suite, key or release; carries `nearest` names
    ├── Conflict                 6  somebody else holds it: a lease, a name, a newer version
    │   ├── Ambiguous            6  a prefix that several names share; carries `candidates`
    │   ├── Moved                6  bytes that were to be shared lie elsewhere by now
    │   ├── Purged               6  rows of policies that were purged; carries `policies`
    │   └── Cancelled            6  the operation was called off
    └── ServiceError             7  a service is down, full, or answered with a fault
        ├── PortInUse            7
        ├── MissingBytes         7  an adapter's bytes are not where its row says, or cannot be read now
        └── Busy                 7  full for the moment; carries `retry_after_s` and the queue's state

A message is a full sentence: what is wrong, then what to do. Errors hold strings and numbers
only, so that they cross process borders by pickle.
"""

from collections.abc import Iterable, Mapping


class GraftworkError(Exception):
    exit_code = 1


class ConfigError(GraftworkError):
    exit_code = 2


class BaseModelError(GraftworkError):
    exit_code = 3


class AdapterError(GraftworkError):
    exit_code = 4


class EffectError(AdapterError):
    pass


class DamagedBytes(AdapterError):
    pass


class NotFound(GraftworkError):
    exit_code = 5

    def __init__(self, message: str, nearest: Iterable[str] = ()):
        super().__init__(message)
        self.nearest = tuple(nearest)


class Conflict(GraftworkError):
    exit_code = 6


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


class ServiceError(GraftworkError):
    exit_code = 7


class PortInUse(ServiceError):
    pass


class MissingBytes(ServiceError):
    pass


class Busy(ServiceError):
    def __init__(
        self, message: str, retry_after_s: float = 1.0, queue: Mapping[str, float | str] | None = None
    ):
        super().__init__(message, retry_after_s, queue)
        self.retry_after_s, self.queue = retry_after_s, dict(queue or {})

    def __str__(self) -> str:
        return str(self.args[0])
