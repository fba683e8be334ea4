"""All sessions on one base, and the one thread that carries their operations out.

Knows who may write a session and which operations are known already. Knows nothing of HTTP.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from engine.adapters.catalog import Policy
from engine.config import Params
from engine.errors import Busy, ConfigError, Conflict, NotFound, ServiceError
from engine.training import protocol
from engine.training.export import Exporter
from engine.training.lora import Example, ResidentBase, Row
from engine.training.metrics import TrainerMetrics, peak_memory
from engine.training.session import CURRENT, Session

LEASE_S = 30.0
KEPT_OPERATIONS = 4096


@dataclass
class Open:
    """A session in memory, who writes it, and when that holder was last heard of (monotonic seconds)."""

    session: Session
    request: protocol.CreateSession
    heard: float


class Trainer:
    """All sessions on one base. Its operations run on one thread; `submit` may be called from any."""

    def __init__(self, params: Params, base: ResidentBase, base_digest: str, exporter: Exporter):
        self.params, self.base, self.base_digest, self.exporter = params, base, base_digest, exporter
        self.open: dict[str, Open] = {}
        self.metrics = TrainerMetrics()
        # Grows over restarts too, so that a fence of an earlier process is never accepted again.
        self.fence = time.time_ns()
        self._operations: dict[str, Future[Any]] = {}
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    def submit(self, request: protocol.Request, work: Callable[[Any], Any]) -> str:
        """Queue an operation and return its id; a request that is queued or done already stays as it is.

        One that failed is tried again.
        """
        with self._lock:
            known = self._operations.get(request.request_id)
            if known is None or (known.done() and known.exception()):
                self._operations[request.request_id] = self._thread.submit(self.metrics.timed(work), request)
            for old in list(self._operations)[:-KEPT_OPERATIONS]:
                del self._operations[old]
        return request.request_id

    def operation(self, id: str) -> Future[Any]:
        if id not in self._operations:
            raise NotFound(
                f"There is no operation {id!r}; the trainer may have been restarted. Send it again."
            )
        return self._operations[id]

    def create_session(self, request: protocol.CreateSession) -> dict[str, Any]:
        """Open a session, or go on with it from its last stored step."""
        known = self.open.get(request.session)
        if known and known.request.holder != request.holder and time.monotonic() - known.heard < LEASE_S:
            raise Conflict(
                f"Session {request.session!r} is being written by {known.request.holder!r}. "
                f"Wait until it has been silent for {LEASE_S:.0f} s, or use another session."
            )
        self._make_room(request)
        session = self._load(request)
        self.fence += 1
        session.fence = self.fence
        self.open[request.session] = Open(session, request, time.monotonic())
        return asdict(session.info())

    def _load(self, request: protocol.CreateSession) -> Session:
        directory = self.params.paths.sessions / request.session
        session = Session(directory, self.base, self.base_digest, request)
        if session.exists:
            session.load(CURRENT)
            return session
        if request.parent:
            session.adapter.load_canonical(self.exporter.parent_tensors(request.policy, request.parent))
        self._add_policy(request)
        session.save(CURRENT)
        return session

    def _add_policy(self, request: protocol.CreateSession) -> None:
        config, catalog = request.policy_config, self.exporter.catalog
        if config is None:
            # Raises for a policy that nobody has described: its revisions could never be released.
            catalog.policy(request.policy)
            return
        catalog.add_policy(Policy(request.policy, self.base_digest, config, request.owner, time.time()))

    def _make_room(self, request: protocol.CreateSession) -> None:
        others = {name: item for name, item in self.open.items() if name != request.session}
        if len(others) < self.params.trainer.sessions:
            return
        oldest = min(others, key=lambda name: others[name].heard)
        if time.monotonic() - others[oldest].heard < LEASE_S:
            raise Busy(f"The trainer holds {len(others)} sessions, and all are in use.", LEASE_S)
        del self.open[oldest]

    def _writable(self, request: protocol.SessionRequest) -> Open:
        item = self.open.get(request.session)
        if item is None:
            raise ServiceError(
                f"Session {request.session!r} is not open; the trainer may have been restarted. "
                "Create it again; it goes on from its last step."
            )
        if item.session.fence != request.fence:
            raise Conflict(f"Session {request.session!r} has another writer now; this one must stop.")
        item.heard = time.monotonic()
        return item

    def forward_backward(self, request: protocol.ForwardBackward) -> dict[str, Any]:
        given = request.forward_backward_input
        session = self._writable(request).session
        data = [example_of(datum) for datum in given.data]
        found = session.forward_backward(data, given.loss_fn, given.loss_fn_config)
        outputs = [{"logprobs": {"data": row, "dtype": "float32"}} for row in found.logprobs]
        metrics = {**asdict(found.metrics), "peak_memory": peak_memory()}
        return {"loss_fn_outputs": outputs, "metrics": metrics}

    def optim_step(self, request: protocol.OptimStep) -> dict[str, Any]:
        session = self._writable(request).session
        before = session.step
        result = dict(session.optim_step(request))
        if session.step > before:
            self.metrics.observe_step(session.history[-1])
        return result

    def save_state(self, request: protocol.NamedState) -> dict[str, Any]:
        return {"path": str(self._writable(request).session.save(request.name))}

    def load_state(self, request: protocol.NamedState) -> dict[str, Any]:
        session = self._writable(request).session
        session.load(request.name)
        session.save(CURRENT)
        return asdict(session.info())

    def export(self, request: protocol.Export) -> dict[str, Any]:
        item = self._writable(request)
        exported = asdict(self.exporter.export(item.session, item.request, request))
        return {**exported, "directory": str(exported["directory"]) if exported["directory"] else None}

    def probe(self, request: protocol.ProbeRevision) -> dict[str, Any]:
        return self.exporter.probe_revision(self.base, self.base_digest, request).to_json()

    def render_metrics(self) -> bytes:
        """Return what Prometheus reads."""
        held = list(self.open.values())
        held.sort(key=lambda item: item.heard)
        queued = sum(not operation.done() for operation in list(self._operations.values()))
        return self.metrics.render([item.session for item in held], queued)

    def close(self) -> None:
        self._thread.shutdown(wait=True)


def example_of(datum: protocol.Datum) -> Example:
    """Turn a datum into a row with its completion's log-probabilities and advantages, where it has them.

    Raises `ConfigError` when the completion is not one run at the end or the lengths differ.
    """
    inputs = {name: tensor.data for name, tensor in datum.loss_fn_inputs.items()}
    tokens = [token for chunk in datum.model_input.chunks for token in chunk.tokens]
    missing = {"target_tokens", "weights"} - set(inputs)
    if missing or any(len(values) != len(tokens) for values in inputs.values()):
        raise ConfigError(
            f"A datum needs target_tokens and weights, and {len(tokens)} values in each loss input; "
            f"missing: {sorted(missing)}."
        )
    first = inputs["weights"].index(1.0) if 1.0 in inputs["weights"] else len(tokens)
    if first == len(tokens) or inputs["weights"][first:] != [1.0] * (len(tokens) - first):
        raise ConfigError("A datum's weights must be 0 over the prompt and then 1 to the end.")
    whole = (*tokens, int(inputs["target_tokens"][-1]))
    old, advantages = (tuple(inputs.get(name, ())[first:]) for name in ("logprobs", "advantages"))
    return Example(Row(whole, first + 1), old, advantages)
