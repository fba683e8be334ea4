"""The Tinker API in this process over a fake trainer and engine, served on a port for the real SDK."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn

from engine.catalog.catalog import Catalog, migrate
from engine.catalog.opening import whole_catalog
from engine.catalog.tinker_records import TinkerModel
from engine.errors import ConfigError, ServiceError
from engine.tinker.codec import write_samples
from engine.tinker.models import Models
from engine.tinker.service import make_app
from engine.training.service.protocol import Exported
from tests.helpers.live import free_port

# What the twice-sent POSTs are: everything but polls, which have no effect.
POLLS = ("/api/v1/retrieve_future", "/api/v1/telemetry")


class FakeBackend:
    """A trainer whose weight of each model is one number, and an engine that answers it."""

    base_name, architecture = "tiny-dense", "qwen3"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.weight: dict[str, float] = {}
        self.gradient: dict[str, float] = {}
        self.states: dict[tuple[str, str], float] = {}
        self.gate = threading.Event()
        self.gate.set()

    def described(self) -> dict[str, Any]:
        return {"model_name": self.base_name, "max_context_length": 256}

    def refuse_base(self, name: str) -> None:
        if name != self.base_name:
            raise ConfigError(f"The base {name!r} is not resident. Use tiny-dense.")

    def refuse_rank(self, rank: int) -> None:
        if rank > 32:
            raise ConfigError(f"Rank {rank} is over engine.max_rank, 32.")

    def targets(self, attention: bool, mlp: bool) -> list[str]:
        return [*(["q_proj"] if attention else []), *(["up_proj"] if mlp else [])]

    def trains(self, targets: list[str]) -> tuple[bool, bool]:
        return "q_proj" in targets, "up_proj" in targets

    def create(self, model: TinkerModel, source: Any, seed: int | None) -> None:
        self.calls.append(("create", model.id, model.rank))
        start = self.states[source.model.id, source.checkpoint.stored] if source else 0.0
        self.weight[model.id], self.gradient[model.id] = start, 0.0

    def reopen(self, model: TinkerModel) -> None:
        self.calls.append(("reopen", model.id))

    def take_open(self, models: Sequence[TinkerModel]) -> list[str]:
        return [model.id for model in models]

    def close_session(self, id: str) -> None:
        self.calls.append(("close", id))

    def forward_backward(self, model: TinkerModel, batch: Any) -> tuple[list[np.ndarray], dict[str, float]]:
        assert self.gate.wait(20)
        self.calls.append(("forward" if batch.forward_only else "gradients", batch.seq_id, len(batch.data)))
        if batch.loss == "ppo":
            raise ServiceError("The trainer does not answer.")
        total = sum(float(one.inputs["weights"].sum()) for one in batch.data)
        self.gradient[model.id] += 0.0 if batch.forward_only else total
        shown = [np.full(one.inputs["target_tokens"].shape, self.weight[model.id]) for one in batch.data]
        return shown, {"loss:sum": total}

    def optim_step(self, model: TinkerModel, request: str, adam: Any) -> dict[str, float]:
        self.calls.append(("step", request))
        self.weight[model.id] += adam.learning_rate * self.gradient[model.id]
        self.gradient[model.id] = 0.0
        return {"weight": self.weight[model.id]}

    def save_state(self, model: TinkerModel, name: str) -> None:
        self.calls.append(("save", name))
        self.states[model.id, name] = self.weight[model.id]

    def load_state(self, model: TinkerModel, source: Any) -> None:
        self.weight[model.id] = self.states[source.model.id, source.checkpoint.stored]

    def delete_state(self, model: TinkerModel, name: str) -> None:
        self.states.pop((model.id, name), None)

    def export_revision(self, model: TinkerModel, prompts: list[list[int]]) -> Exported:
        self.calls.append(("revision", prompts))
        return self._exported(model, Path())

    def export_snapshot(self, model: TinkerModel) -> Exported:
        self.calls.append(("snapshot", model.id))
        return self._exported(model, None)

    def _exported(self, model: TinkerModel, directory: Path | None) -> Exported:
        digest = f"{self.weight[model.id]:064.3f}"
        return Exported(digest, f"{model.policy}@{digest[-12:]}", directory, model.rank, 1, 10, 0.0)

    def retire(self, policy: str, digest: str) -> None:
        self.calls.append(("retire", policy, digest))

    def sample(self, served: str, plaintext: str, calls: Sequence[Any], patience_s: float) -> list[bytes]:
        assert plaintext.startswith("tml-")
        self.calls.append(("sample", served, [body.seq_id for body in calls]))
        if any(chunk.tokens == [999] for body in calls for chunk in body.prompt.chunks):
            raise ConfigError("The vocabulary has no token 999.")
        return [self._sampled(body) for body in calls]

    def _sampled(self, body: Any) -> bytes:
        prompt = [token for chunk in body.prompt.chunks for token in chunk.tokens]
        one = {"tokens": [7, 8], "logprobs": [-0.5, -0.25], "stop_reason": "stop"}
        logprobs = [None, *(-1.0 for _ in prompt[1:])] if body.prompt_logprobs else None
        return write_samples([one] * body.num_samples, logprobs)


class Twice:
    """Send every POST with an effect to the app twice; the client sees the second answer."""

    def __init__(self, app: Any):
        self.app, self.seen = app, []
        self.loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.loop = asyncio.get_running_loop()
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] in POLLS:
            return await self.app(scope, receive, send)
        pieces, more = [], True
        while more:
            message = await receive()
            pieces.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = b"".join(pieces)
        answers: list[list[Any]] = [[], []]
        for answer in answers:

            async def again() -> dict[str, Any]:
                return {"type": "http.request", "body": body, "more_body": False}

            async def hold(message: Any, answer: list[Any] = answer) -> None:
                answer.append(message)

            await self.app(dict(scope), again, hold)
        self.seen.append(
            (scope["path"], dict(scope["headers"]), body, *(one[-1].get("body") for one in answers))
        )
        for message in answers[1]:
            await send(message)


class Served:
    """A served Tinker API: `url`, keys of two tenants, the fake behind it, or the `trainers`."""

    trainers: Any = None

    def __init__(self, url: str, catalog: Catalog, models: Models, backend: FakeBackend, twice: Twice):
        self.http = httpx.Client(timeout=30, trust_env=False)
        self.url, self.catalog, self.models, self.backend, self.twice = url, catalog, models, backend, twice
        self.key, self.other = (
            "tml-" + catalog.keys.create(owner, "tinker", [f"{owner}-*"]).removeprefix("gw-")
            for owner in ("acme", "other")
        )

    def ask(self, method: str, path: str, key: str | None = None, **given: Any) -> httpx.Response:
        """Send one request with a key of `acme`, or another."""
        headers = {"x-api-key": key or self.key}
        return self.http.request(method, f"{self.url}/api/v1{path}", headers=headers, **given)

    def result(self, request_id: str) -> dict[str, Any]:
        """Poll for a call's result as the SDK does: on a busy machine one poll may end before the call."""
        poll = {"request_id": request_id}
        while (answer := self.ask("POST", "/retrieve_future", json=poll)).status_code == 408:
            pass
        return answer.json()

    def raw(self, path: str, body: bytes, headers: dict[str, str]) -> httpx.Response:
        """Post bytes as they are."""
        return self.http.post(f"{self.url}/api/v1{path}", content=body, headers=headers)


@contextmanager
def tinker_served(
    directory: Path, backend_of: Callable[[Catalog], Any] = lambda _: FakeBackend()
) -> Iterator[Served]:
    """Serve the Tinker API over a catalog in `directory`, by default over a fake trainer."""
    url = f"sqlite:///{directory / 'catalog.db'}"
    migrate(url)
    with whole_catalog(url) as catalog:
        backend = backend_of(catalog)
        models = Models(catalog, backend)
        twice, port = Twice(make_app(models)), free_port()
        config = uvicorn.Config(twice, "127.0.0.1", port, log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
            yield Served(f"http://127.0.0.1:{port}", catalog, models, backend, twice)
        finally:
            server.should_exit = True
            thread.join(20)
