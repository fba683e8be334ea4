"""What the clients of our services share: the connection, the key, retries, and faults as our errors."""

import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, Self, TypeVar

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from engine.errors import GraftworkError, NotRunning, ServiceError, of_status

Answer = TypeVar("Answer")
# Characters of an answer that is no JSON of ours.
SHOWN = 300


@cache
def certificates() -> ssl.SSLContext:
    """Return those that every client trusts, read once: to read them takes longer than most requests."""
    return httpx.create_ssl_context()


def connect(url: str, timeout_s: float = 5.0) -> httpx.Client:
    """Return a client of the server at `url`; a proxy that the environment names is not asked."""
    return httpx.Client(base_url=url, timeout=timeout_s, verify=certificates(), trust_env=False)


class ServiceClient:
    """Talk to the service `name` at `url`, as whoever holds `key`; a context manager, for any thread.

    One that is away is asked again for up to `patience_s`. Then `NotRunning` when nothing listens there, and
    `ServiceError` when it does not answer within `timeout_s`. What it refuses is raised as its status says.
    """

    def __init__(self, name: str, url: str, key: str = "", timeout_s: float = 10.0, patience_s: float = 0.0):
        self.name, self.url, self.patience_s = name, url, patience_s
        self._http = connect(url, timeout_s)
        if key:
            self._http.headers["authorization"] = f"Bearer {key}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def is_healthy(self, path: str = "/health") -> bool:
        """Say whether it answers, and well; it is asked once."""
        with suppress(httpx.TransportError):
            return self._http.get(path).status_code == 200
        return False

    def _ask(self, method: str, path: str, **given: Any) -> Any:
        """Return the JSON of an answer."""
        return self._patiently(lambda: self._told(self._http.request(method, path, **given)))

    def _patiently(self, call: Callable[[], Answer], *also: type[Exception]) -> Answer:
        """Return what `call` does, called again while the service is away or the fault is one of `also`."""
        again = Retrying(
            retry=retry_if_exception_type((httpx.TransportError, *also)),
            stop=stop_after_delay(self.patience_s),
            wait=wait_exponential(0.1, max=2.0),
            reraise=True,
        )
        try:
            return again(call)
        except httpx.TransportError as error:
            kind = NotRunning if isinstance(error, httpx.ConnectError) else ServiceError
            raise kind(
                f"The {self.name} at {self.url} does not answer ({error!r}). `graftwork status` shows "
                "whether it is up, `graftwork up` starts it."
            ) from None

    def _told(self, response: httpx.Response) -> Any:
        if response.is_success:
            return response.json()
        raise self._fault(response)

    def _fault(self, response: httpx.Response) -> GraftworkError:
        """Return what an answer means that is none, in the service's own words if it has any."""
        said = body_of(response).get("error")
        words = said.get("message") if isinstance(said, dict) else said
        otherwise = f"The {self.name} answered {response.status_code}: {response.text[:SHOWN]}"
        return of_status(response.status_code)(words or otherwise)


def body_of(response: httpx.Response) -> dict[str, Any]:
    """Return an answer's JSON; nothing when it is of another type."""
    is_json = response.headers.get("content-type", "").startswith("application/json")
    return dict(response.json()) if is_json else {}
