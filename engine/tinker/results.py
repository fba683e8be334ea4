"""Results of calls under way: a call's request id, what it will answer, and who may ask.

Results stay in memory for clients that poll. Those of calls that changed something are in the catalog too,
so that they outlive this process; the others are gone with it, and the client repeats the call.
"""

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass, field

import orjson

from engine.errors import Busy, GraftworkError

logger = logging.getLogger(__name__)
BROKEN = "The server failed; its log has the cause."
PROTOBUF, JSON = "application/x-protobuf", "application/json"
# Finished results in memory: some 10,000 samples, or an hour of forward_backward of 256 x 512 tokens.
MOST_RESULTS, MOST_BYTES = 20_000, 512 << 20


@dataclass(frozen=True)
class Result:
    """A finished call's answer; `is_users`: it is an error of what was sent."""

    body: bytes
    media_type: str = JSON
    is_users: bool = False

    @classmethod
    def of(cls, body: object) -> "Result":
        """Return a JSON answer."""
        return cls(orjson.dumps(body))


def error_result(error: Exception, what: str) -> Result:
    """Return the answer of a call that failed; the SDK raises `RequestFailedError` with its sentence.

    A client polls for it, whatever ended the call. `what` failed goes to the log, unless it is one of our
    errors.
    """
    sentence, by_user = BROKEN, False
    if isinstance(error, GraftworkError):
        sentence, by_user = str(error), error.status < 500 and not isinstance(error, Busy)
    else:
        logger.error("%s", what, exc_info=error)
    body = orjson.dumps({"error": sentence, "category": "user" if by_user else "server"})
    return Result(body, is_users=by_user)


@dataclass(eq=False)
class Promise:
    """A call's future result; `ready` is set with it."""

    id: str
    tenant: str
    result: Result | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class Promises:
    """The promises of this process, by request id. Used on the event loop only."""

    def __init__(self) -> None:
        self._known: dict[str, Promise] = {}
        self._finished: OrderedDict[str, int] = OrderedDict()
        self._bytes = 0

    def find(self, tenant: str, id: str) -> Promise | None:
        """Return the tenant's promise with this id, or None."""
        promise = self._known.get(id)
        return promise if promise and promise.tenant == tenant else None

    def add(self, tenant: str, id: str) -> Promise:
        """Add a promise. The id must be new."""
        assert id not in self._known
        promise = self._known[id] = Promise(id, tenant)
        return promise

    def keep(self, promise: Promise, result: Result) -> None:
        """Set a promise's result, and forget the oldest results beyond the limits."""
        promise.result = result
        promise.ready.set()
        self._finished[promise.id] = len(result.body)
        self._bytes += len(result.body)
        while len(self._finished) > MOST_RESULTS or (self._bytes > MOST_BYTES and len(self._finished) > 1):
            oldest, size = self._finished.popitem(last=False)
            self._bytes -= size
            del self._known[oldest]

    def drop(self, promise: Promise) -> None:
        """Forget a promise without a result, so that its call may be sent again."""
        del self._known[promise.id]

    async def wait(self, promise: Promise, seconds: float) -> Result | None:
        """Return a promise's result; None when it has none after so many seconds."""
        try:
            await asyncio.wait_for(promise.ready.wait(), seconds)
        except TimeoutError:
            return None
        return promise.result
