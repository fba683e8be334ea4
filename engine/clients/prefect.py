"""Authentication at Prefect's API for plain HTTP clients; Prefect's own client does the same by itself."""

import uuid
from collections.abc import Generator

import httpx

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class PrefectLogin(httpx.Auth):
    """Sends user and password, and with every change the CSRF token that Prefect asks for."""

    def __init__(self, user: str, password: str):
        self._basic = httpx.BasicAuth(user, password)
        self._client = str(uuid.uuid4())
        self._token = ""

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Send the request; fetch a token first, and again when it has expired.

        Raises `httpx.HTTPStatusError` when Prefect gives no token.
        """
        request = next(self._basic.auth_flow(request))
        if request.method in SAFE_METHODS:
            yield request
            return
        for _ in range(2):
            if not self._token:
                at = request.url.copy_with(path="/api/csrf-token", query=f"client={self._client}".encode())
                answer = yield next(self._basic.auth_flow(httpx.Request("GET", at)))
                answer.raise_for_status()
                answer.read()
                self._token = answer.json()["token"]
            request.headers["Prefect-Csrf-Client"] = self._client
            request.headers["Prefect-Csrf-Token"] = self._token
            response = yield request
            if response.status_code != 403:
                return
            self._token = ""
