"""The base class of the services' HTTP clients: connection, key, retries, translation of errors."""

import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, Self, TypeVar

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from engine.errors import GraftworkError, NotRunning, ServiceError, of_status

Answer = TypeVar("Answer")
Form = TypeVar("Form", dict[str, Any], list[Any])
# How many characters of an unexpected answer an error shows.
SHOWN = 300


@cache
def certificates() -> ssl.SSLContext:
    """Return the TLS context that all clients share: loading it takes longer than most requests."""
    return httpx.create_ssl_context()


def connect(url: str, timeout_s: float = 5.0, login: httpx.Auth | None = None) -> httpx.Client:
    """Return an HTTP client for the server at `url`; it ignores proxy variables of the environment.

    `login` adds what the server asks for, such as `httpx.BasicAuth`.
    """
    return httpx.Client(base_url=url, timeout=timeout_s, verify=certificates(), trust_env=False, auth=login)


class ServiceClient:
    """Call the service `name` at `url` with `key`; a thread-safe context manager.

    Calls are retried for up to `patience_s` while the service is down. After that they raise `NotRunning`
    when nothing listens there, and `ServiceError` when no answer comes within `timeout_s`. An error answer
    raises the class of its HTTP status.
    """

    def __init__(self, name: str, url: str, key: str = "", timeout_s: float = 10.0, patience_s: float = 0.0):
        self.name, self.url, self.patience_s = name, url, patience_s
        self.http = connect(url, timeout_s)
        if key:
            self.http.headers["authorization"] = f"Bearer {key}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self.http.close()

    def is_healthy(self, path: str = "/health") -> bool:
        """Return whether the service answers 200 at `path`; without retries."""
        with suppress(httpx.TransportError):
            return self.http.get(path).status_code == 200
        return False

    def _ask(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Send a request, with retries; return the answer's JSON object."""
        return self._patiently(lambda: self._json_of(self.http.request(method, path, **options), dict))

    def _ask_list(self, method: str, path: str, **options: Any) -> list[dict[str, Any]]:
        """Send a request, with retries; return the objects of the answer's JSON array."""
        return self._patiently(lambda: self._json_of(self.http.request(method, path, **options), list))

    def _patiently(
        self, call: Callable[[], Answer], *also: type[Exception], patience_s: float | None = None
    ) -> Answer:
        """Return the result of `call`, retried on transport errors and those in `also`.

        `patience_s` replaces the client's own.
        """
        again = Retrying(
            retry=retry_if_exception_type((httpx.TransportError, *also)),
            stop=stop_after_delay(self.patience_s if patience_s is None else patience_s),
            wait=wait_exponential(0.1, max=2.0),
            reraise=True,
        )
        try:
            return again(call)
        except httpx.TransportError as error:
            kind = NotRunning if isinstance(error, httpx.ConnectError) else ServiceError
            raise kind(
                f"The {self.name} at {self.url} does not answer ({error!r}). Check it with "
                "`graftwork status`; start it with `graftwork up`."
            ) from None

    def _json_of(self, response: httpx.Response, kind: type[Form]) -> Form:
        """Return a successful answer's JSON of this kind; whoever stands between may have said another."""
        if not response.is_success:
            raise self._error_of(response)
        with suppress(ValueError):
            if isinstance(answer := response.json(), kind):
                return answer
        raise ServiceError(
            f"The {self.name} at {self.url} answered {response.status_code} with what it never says: "
            f"{response.text[:SHOWN]!r}. Check what is at this address."
        )

    def _error_of(self, response: httpx.Response) -> GraftworkError:
        """Return the error for an unsuccessful answer, with the service's own message if it has one."""
        error = body_of(response).get("error")
        words = error.get("message") if isinstance(error, dict) else error
        words = words if isinstance(words, str) else ""
        otherwise = f"The {self.name} answered {response.status_code}: {response.text[:SHOWN]}"
        return of_status(response.status_code)(words or otherwise)


def body_of(response: httpx.Response) -> dict[str, Any]:
    """Return an answer's JSON object; an empty one when the answer is not JSON."""
    if response.headers.get("content-type", "").startswith("application/json"):
        with suppress(ValueError):
            body = response.json()
            return body if isinstance(body, dict) else {}
    return {}
