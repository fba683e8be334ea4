"""The tree of errors that Graftwork raises for a person to read.

    GraftworkError               exit code 1, HTTP status 500
    ├── ConfigError              2  400  a setting, a form or a settings file is wrong
    │   ├── Unauthorized         2  401  the call needs a valid API key
    │   └── Forbidden            2  403  the API key lacks a role that the call needs
    ├── BaseModelError           3  500  the base is missing, incomplete or another one
    ├── AdapterError             4  422  an adapter cannot be accepted: format, shape, values
    │   ├── EffectError          4  422  the engine does not reproduce the trainer's log-probabilities
    │   └── DamagedBytes         4  422  its bytes in the store do not match their checksum
    ├── NotFound                 5  404  no such policy, revision, suite, key or release; carries `nearest`
    ├── Conflict                 6  409  another holder has the lease or the name, or the version has changed
    │   ├── Ambiguous            6  409  several names start with the prefix; carries `candidates`
    │   ├── Moved                6  409  bytes to be shared have moved in the store
    │   ├── Purged               6  409  some of the policies were purged
    │   └── Cancelled            6  409  the operation was cancelled
    ├── Gone                     1  410  the pinned revision is no longer served
    └── ServiceError             7  503  a service is down, full, or answered with an error
        ├── NotRunning           7  503  nothing listens at its address
        ├── PortInUse            7  503  another process listens at its address
        ├── MissingBytes         7  503  an adapter's bytes are not at the place in its row, or are unreadable
        └── Busy                 7  429  the queue is full; carries `retry_after_s` and the queue's state
            └── LimitReached     7  429  a limit of the key or its tenant is reached; carries `code`

A message is full sentences: what is wrong, what was seen, what to do. Errors hold only strings and numbers,
so that they can be pickled.
"""

from collections.abc import Iterable, Mapping


class GraftworkError(Exception):
    """The root: any error meant for a person, with its exit code and HTTP status."""

    exit_code = 1
    status = 500


class ConfigError(GraftworkError):
    """A setting, a form or a settings file is wrong."""

    exit_code = 2
    status = 400


class Unauthorized(ConfigError):
    """The call needs a valid API key."""

    status = 401


class Forbidden(ConfigError):
    """The API key lacks a role that the call needs."""

    status = 403


class BaseModelError(GraftworkError):
    """The base is missing, incomplete, or not the one that is needed."""

    exit_code = 3


class AdapterError(GraftworkError):
    """An adapter cannot be accepted: its format, its shapes or its values are wrong."""

    exit_code = 4
    status = 422


class EffectError(AdapterError):
    """The engine does not reproduce the trainer's log-probabilities."""


class DamagedBytes(AdapterError):
    """An adapter's bytes in the store do not match their checksum."""


class NotFound(GraftworkError):
    """No such policy, revision, suite, key or release; `nearest` holds similar names."""

    exit_code = 5
    status = 404

    def __init__(self, message: str, nearest: Iterable[str] = ()):
        super().__init__(message)
        self.nearest = tuple(nearest)


class Conflict(GraftworkError):
    """Another holder has the lease or the name, or the version has changed."""

    exit_code = 6
    status = 409


class Ambiguous(Conflict):
    """Several names start with the given prefix; `candidates` lists them."""

    def __init__(self, message: str, candidates: Iterable[str] = ()):
        super().__init__(message)
        self.candidates = tuple(candidates)


class Purged(Conflict):
    """Some of the revisions to publish belong to purged policies."""


class Moved(Conflict):
    """Bytes to be shared have moved in the store."""


class Cancelled(Conflict):
    """The operation was cancelled."""


class Gone(GraftworkError):
    """The pinned revision is no longer served; the message is the reason."""

    status = 410


class ServiceError(GraftworkError):
    """A service is down, full, or answered with an error."""

    exit_code = 7
    status = 503


class NotRunning(ServiceError):
    """Nothing listens at the service's address."""


class PortInUse(ServiceError):
    """Another process listens at the service's address."""


class MissingBytes(ServiceError):
    """An adapter's bytes are not at the place in its row, or cannot be read now."""


class Busy(ServiceError):
    """The queue is full; `retry_after_s` says when to retry, `queue` holds the queue's state."""

    status = 429

    def __init__(
        self, message: str, retry_after_s: float = 1.0, queue: Mapping[str, float | str] | None = None
    ):
        super().__init__(message, retry_after_s, queue)
        self.retry_after_s, self.queue = retry_after_s, dict(queue or {})

    def __str__(self) -> str:
        return str(self.args[0])


class LimitReached(Busy):
    """A limit of the API key or its tenant is reached; `code` is that of OpenAI's error."""

    def __init__(self, message: str, retry_after_s: float, code: str = "rate_limit_exceeded"):
        super().__init__(message, retry_after_s)
        self.args = (message, retry_after_s, code)
        self.code = code


def of_status(status: int) -> type[GraftworkError]:
    """Return the class that a client raises for a response with this HTTP status."""
    named = (ConfigError, Unauthorized, Forbidden, AdapterError, NotFound, Conflict, Gone, Busy)
    otherwise = ConfigError if 400 <= status < 500 else ServiceError
    return next((kind for kind in named if kind.status == status), otherwise)
