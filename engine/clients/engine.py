"""The engine's HTTP client: log-probabilities, rollouts, chats, residency and the engine's marker."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import quote

import httpx

from engine.clients.http_client import SHOWN, ServiceClient
from engine.errors import ConfigError, NotFound, ServiceError, of_status


class EngineClient(ServiceClient):
    """Call the engine at `url`; `purpose` (user, probe, score or rollout) is sent with every request."""

    def __init__(
        self, url: str, key: str = "", purpose: str = "user", timeout_s: float = 10.0, patience_s: float = 0.0
    ):
        super().__init__("engine", url, key, timeout_s, patience_s)
        self.http.headers["x-graftwork-purpose"] = purpose

    def marker(self) -> dict[str, Any]:
        """Return the plugin's marker: versions, base and its text digest, workers.

        Raises `ServiceError` when the engine runs without our plugin.
        """
        try:
            return self._ask("GET", "/graftwork/marker")
        except NotFound:
            raise ServiceError(
                "The engine runs without Graftwork's plugin. Install the project with `pip install -e .`."
            ) from None

    def residency(self) -> dict[str, Any]:
        """Return tiers, load queue and each resident adapter; sizes in bytes, times in seconds."""
        return self._ask("GET", "/graftwork/residency")

    def copies(self, policies: Mapping[str, float], most: int) -> dict[str, Any]:
        """Have the gateway copy this share of each policy's answers to users for some seconds.

        Return the oldest `copies` that wait, at most so many; how many were `dropped` since the last call;
        and of `users` the seconds to the first byte since then, of `streamed` answers and of `whole` ones.
        Without policies nothing is copied any more.
        """
        return self._ask("POST", "/graftwork/copies", json={"policies": dict(policies), "most": most})

    def logprobs(self, model: str, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability (nats) of each of T token ids but the first: T - 1 values.

        Raises `AdapterError` with the engine's message when it refuses the adapter, `NotFound`, `Conflict`
        or `Gone` when it does not serve the model, and `ServiceError` when it does not answer.
        """
        body = {"model": model, "prompt": [*tokens], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        entries = self._ask("POST", "/v1/completions", json=body)["choices"][0]["prompt_logprobs"]
        return [entries[i][str(token)]["logprob"] for i, token in enumerate(tokens) if i > 0]

    def find_model(self, name: str) -> None:
        """Raise `NotFound`, with the nearest names, or `Gone`, with the reason, unless `name` is served."""
        self._ask("GET", f"/v1/models/{quote(name, safe='')}")

    @contextmanager
    def chat(self, body: Mapping[str, Any]) -> Iterator[tuple[str, Iterator[str]]]:
        """Give the served name that answers a chat, and its answer's pieces as they come.

        `body` is OpenAI's. Leaving the block stops the answer. Raises the error of the engine's answer; the
        pieces raise `ServiceError` when the answer breaks off.
        """
        with self._stream("/v1/chat/completions", body) as response:
            yield response.headers["x-graftwork-revision"], _pieces(response)

    def timed(self, model: str, prompt: Sequence[int], answer: int) -> tuple[float, float]:
        """Have token ids answered; return seconds to the first of `answer` tokens, and on to the last.

        Raises the error of the engine's answer, and `ServiceError` when it breaks off or has no token.
        """
        body = {"model": model, "prompt": [*prompt], "max_tokens": answer, "ignore_eos": True}
        began = time.monotonic()
        with self._stream("/v1/completions", body) as response:
            moments = [time.monotonic() for _ in _events(response)]
        if not moments:
            raise ServiceError(f"The engine's answer of {model!r} has no token. Look into its log.")
        return moments[0] - began, moments[-1] - moments[0]

    @contextmanager
    def _stream(self, path: str, body: Mapping[str, Any]) -> Iterator[httpx.Response]:
        """Give the successful answer to a request for a stream; leaving the block stops it."""
        request = self.http.build_request("POST", path, json={**body, "stream": True})
        with closing(self._patiently(lambda: self.http.send(request, stream=True))) as response:
            if not response.is_success:
                response.read()
                raise self._error_of(response)
            yield response

    def samples(self, body: Mapping[str, Any], patience_s: float | None = None) -> dict[str, Any]:
        """Return `n` samples of one prompt (token ids), as `engine.serving.gateway.samples.Samples` asks.

        Of `prompts`, the samples of each are in `groups`; each group is what one prompt's answer is.
        `samples`: `tokens` with the stop sequence's or the end token's, their `logprobs`, and `stop_reason`
        (stop or length). `prompt_logprobs`: one value for each prompt token, None for the first.
        `topk_prompt_logprobs`: for each prompt token pairs of token id and log-probability, None for the
        first. Both are None unless asked for. `usage`: `prompt_tokens` and `completion_tokens`.

        Retries for `patience_s`, by default the client's own, while the engine is full or down. Raises
        `NotFound` for an unknown model, and `ConfigError` for any other 4xx answer.
        """

        def ask() -> dict[str, Any]:
            response = self.http.post("/graftwork/samples", json=body)
            if response.is_success:
                return self._json_of(response, dict)
            kind, excerpt = of_status(response.status_code), response.text[:SHOWN]
            if issubclass(kind, ServiceError):
                raise kind(f"The engine answered {response.status_code}: {excerpt}")
            if kind is NotFound:
                raise kind(f"The engine does not know {body['model']!r}: {excerpt}")
            raise ConfigError(
                f"The engine refused the samples of {body['model']!r} with {response.status_code}: {excerpt} "
                "Check the policy's questions and sampling settings, and engine.max_model_len."
            )

        return self._patiently(ask, ServiceError, patience_s=patience_s)


def _pieces(response: httpx.Response) -> Iterator[str]:
    """Yield the texts of a streamed chat."""
    for event in _events(response):
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the objects of a stream's server-sent events, one a line."""
    try:
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if fault := event.get("error"):
                raise ServiceError(f"The engine broke the answer off: {fault['message']}")
            yield event
    except httpx.TransportError as error:
        raise ServiceError(f"The engine broke the answer off ({error!r}). Ask again.") from None
