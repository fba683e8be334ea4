"""The trainer's operations on sessions of one base, carried out by the queue's one thread.

`sessions` decides who may write and what is in memory; `queue` decides the order. Small `forward_backward`
calls of several sessions share one pass.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

from engine.catalog.catalog import Policy
from engine.errors import ConfigError, GraftworkError, NotFound, ServiceError
from engine.settings.own_functions import refuse_unlisted
from engine.settings.params import Params
from engine.shared_cores import SharedCores
from engine.state_metrics import StateMetrics
from engine.training.loss.grpo import LOSSES
from engine.training.loss.objective import Objective
from engine.training.model.lora import ResidentBase
from engine.training.model.packing import Example
from engine.training.model.update import (
    LossCall,
    check_rows,
    forward_backward,
    is_small,
    is_worth_fusing,
    loss_sum,
)
from engine.training.service import protocol
from engine.training.service.examples import examples_of
from engine.training.service.export import Exporter
from engine.training.service.metrics import TrainerMetrics, peak_memory
from engine.training.service.queue import Operation, Queue
from engine.training.service.session import CURRENT, Session, state_file
from engine.training.service.sessions import Sessions
from engine.training.service.start import ReadTensors, start_of
from engine.training.service.state import find_answer
from engine.work_metrics import WorkMetrics

# Operations that run in parts and can be cancelled between two of them.
WITH_PASSES = protocol.Forward | protocol.ForwardBackward | protocol.Export | protocol.ProbeRevision
# Operations that may wait, of all sessions and of one.
PLACES, SESSION_PLACES = 256, 16
# How many stored sessions are searched for a request's result.
SEARCHED = 256


class Trainer:
    """All sessions on one base. Its operations run on one thread; `submit` may be called from any."""

    def __init__(
        self,
        params: Params,
        base: ResidentBase,
        base_digest: str,
        exporter: Exporter,
        session_bytes: int,
        cores: SharedCores | None = None,
        read_tensors: ReadTensors | None = None,
    ):
        self.cores, self.read_tensors = cores, read_tensors
        self.params, self.base, self.base_digest, self.exporter = params, base, base_digest, exporter
        # Shared passes were measured on CPU only.
        self.fuses = params.trainer.fuse == "auto" and base.shares_passes and base.device.type == "cpu"
        self.queue = Queue(SESSION_PLACES, PLACES, self._perform)
        self.sessions = Sessions(params.paths.sessions, base, base_digest, session_bytes, self.queue.waiting)
        self.metrics = TrainerMetrics()
        WorkMetrics(self.metrics.registry)
        StateMetrics(self.metrics.registry, params.paths)
        # Grows across restarts too, so that the fence of an earlier process is never accepted again.
        self.fence = time.time_ns()

    def submit(self, request: protocol.Request, work: Callable[[Any], Any]) -> str:
        """Queue an operation and return its id; see `Queue`. Raises `Busy` when the queue is full."""
        if isinstance(request, protocol.SessionRequest):
            self.sessions.hear(request.session, request.fence)
        # Operations without a session share one line.
        line = getattr(request, "session", "")
        can_stop = isinstance(request, WITH_PASSES) and not is_brief(request)
        can_join = self.fuses and isinstance(request, protocol.ForwardBackward) and is_joinable(request)
        # An optim_step follows gradients, and an export follows an optim_step.
        leads = isinstance(request, protocol.ForwardBackward | protocol.OptimStep)
        timed = self.metrics.timed(work)
        return self.queue.submit(
            Operation(request, line, timed, can_stop, can_join, is_brief(request), leads)
        )

    def operation(self, id: str) -> "Future[Any]":
        """Return an operation's future; results that were stored before a restart are found too."""
        try:
            operation = self.queue.operation(id)
        except NotFound:
            return self._done_before(id)
        if operation.fence is not None:
            self.sessions.hear(operation.line, operation.fence)
        return operation.future

    def _done_before(self, id: str) -> "Future[Any]":
        for file, header in islice(self.sessions.headers(), SEARCHED):
            # A damaged journal is an error of its own session only.
            with suppress(ServiceError):
                if result := find_answer(file.parent, header, id):
                    future: Future[Any] = Future()
                    future.set_result(result)
                    return future
        raise NotFound(
            f"There is no operation {id!r}; the trainer may have restarted. Send the request again."
        )

    def create_session(self, request: protocol.CreateSession) -> dict[str, Any]:
        """Open a session, or continue it from its last stored step."""
        self.sessions.refuse_other_writers(request)
        session = self.sessions.resume(request) or self._begin(request)
        if not session.is_done(request.request_id):
            self.fence += 1
            session.fence = self.fence
            session.save_answer(request.request_id)
        self.sessions.keep(session)
        return session.journal.answer(request.request_id)

    def _begin(self, request: protocol.CreateSession) -> Session:
        sessions = self.params.paths.sessions
        start = start_of(request, self.base, self.base_digest, self.exporter, sessions, self.read_tensors)
        session = self.sessions.fresh(start.opened)
        start.fill(session.adapter)
        self._add_policy(request)
        return session

    def _add_policy(self, request: protocol.CreateSession) -> None:
        config, catalog = request.policy_config, self.exporter.catalog
        if config is None:
            # Raises for an unknown policy: its revisions could never be released.
            catalog.policies.get(request.policy)
            return
        catalog.policies.add(Policy(request.policy, self.base_digest, config, request.owner, time.time()))

    def close_session(self, request: protocol.CloseSession) -> dict[str, Any]:
        """Close a session, so that other writers may open its policy at once."""
        self.sessions.checked(request)
        self.sessions.release(request.session)
        return {"closed": request.session}

    def forward(self, request: protocol.Forward) -> dict[str, Any]:
        """Return each datum's log-probabilities under the session's adapter, and a summed loss."""
        session, batch = self.sessions.writable(request), request.forward_input
        sums = batch.reduction == "sum"
        objective = Objective.of(batch.loss_fn, batch.loss_fn_config, sums=True) if sums else None
        data = self._examples(batch)
        rows = [example.row for example in data]
        check_rows(self.base, rows)
        logprobs = self.base.score(session.adapter, rows, self._between(request))
        metrics: dict[str, float] = {"tokens": sum(map(len, logprobs))}
        if objective:
            metrics["loss"] = loss_sum(objective, data, logprobs)
        return {"loss_fn_outputs": _outputs(logprobs), "metrics": metrics}

    def forward_backward(self, request: protocol.ForwardBackward) -> dict[str, Any]:
        """Gather the gradients of one request in a pass of its own."""
        return self._gather({self.queue.operation(request.request_id): self._called(request)})[0]

    def _called(self, request: protocol.ForwardBackward) -> tuple[Session, LossCall]:
        session, batch = self.sessions.writable(request), request.forward_backward_input
        session.expect(request.gathered)
        if batch.loss_fn not in LOSSES:
            refuse_unlisted("loss", batch.loss_fn, self.params.python_modules)
        data, sums = self._examples(batch), batch.reduction == "sum"
        call = LossCall(session.adapter, data, batch.loss_fn, batch.loss_fn_config, batch.router_replay, sums)
        return session, call

    def _gather(self, called: Mapping[Operation, tuple[Session, LossCall]]) -> list[dict[str, Any]]:
        """Gather gradients in one pass and return the results; after an error nothing is gathered."""
        results = forward_backward(
            self.base, [call for _, call in called.values()], partial(self._go_on, list(called))
        )
        for session, _ in called.values():
            session.calls += 1
        return [
            {
                "loss_fn_outputs": _outputs(one.logprobs),
                "metrics": {**asdict(one.metrics), "peak_memory": peak_memory()},
            }
            for one in results
        ]

    def _between(self, request: protocol.Request) -> Callable[[], None]:
        """Return a callback that raises `Cancelled` once the request's operation is cancelled."""
        return partial(self._go_on, [self.queue.operation(request.request_id)])

    def _go_on(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            operation.go_on()
        if self.cores:
            self.cores.divide()

    def _perform(self, operations: Sequence[Operation]) -> None:
        """Carry out operations of different sessions: in one pass where possible, else one by one."""
        with self.cores.computing() if self.cores else nullcontext():
            results = self._in_one_pass(operations) if len(operations) > 1 else {}
            for operation in operations:
                if operation in results:
                    operation.future.set_result(results[operation])
                else:
                    operation.perform()

    def _in_one_pass(self, operations: Sequence[Operation]) -> dict[Operation, dict[str, Any]]:
        """Return the results of a shared pass; empty after any error or cancellation.

        A failed pass changes nothing. Each operation then runs alone and gets only its own error.
        """
        began = time.monotonic()
        try:
            called = self._at_hand(operations)
            if not is_worth_fusing(self.base, [call for _, call in called.values()]):
                return {}
            results = self._gather(called)
        except BaseException:
            # A custom loss may raise anything, even `SystemExit`; the trainer's thread must survive.
            self.metrics.unfused.inc()
            return {}
        for _ in results:
            self.metrics.observe_operation("forward_backward", (time.monotonic() - began) / len(results))
        self.metrics.fused.inc(len(results))
        return dict(zip(called, results, strict=True))

    def _at_hand(self, operations: Sequence[Operation]) -> dict[Operation, tuple[Session, LossCall]]:
        """Return the operations that can share a pass: valid, with their sessions in memory."""
        called = {}
        for operation in operations:
            entry, request = self.sessions.find(operation.line), operation.request
            assert isinstance(request, protocol.ForwardBackward)
            if entry and entry.session:
                # An invalid call gets its error when it runs alone.
                with suppress(GraftworkError):
                    called[operation] = self._called(request)
        return called

    def _examples(self, batch: protocol.ForwardBackwardInput) -> list[Example]:
        examples = examples_of(batch)
        for example in examples:
            if example.row.routes is not None:
                self.base.replay.check(example.row.routes)
        return examples

    def optim_step(self, request: protocol.OptimStep) -> dict[str, Any]:
        """Apply the gathered gradients, store the session and count the step in the metrics."""
        session = self.sessions.writable(request)
        before = session.step
        result = session.optim_step(request)
        if session.step > before and session.row:
            self.metrics.observe_step(session.row)
        return result

    def save_state(self, request: protocol.SaveState) -> dict[str, Any]:
        """Store a session under a name."""
        return self.sessions.writable(request).save_as(request.name, request.request_id)

    def load_state(self, request: protocol.LoadState) -> dict[str, Any]:
        """Load a state of a name."""
        return self.sessions.writable(request).load_from(request)

    def delete_state(self, request: protocol.DeleteState) -> dict[str, Any]:
        """Delete a session's state of a name. Idempotent; the session's last step stays."""
        if request.name == CURRENT:
            raise ConfigError(f"{CURRENT!r} is a session's last step. Delete a state by its own name.")
        state_file(self.sessions.directory / request.session, request.name).unlink(missing_ok=True)
        return {"deleted": request.name}

    def export(self, request: protocol.Export) -> dict[str, Any]:
        """Publish a session's adapter as a snapshot or a revision."""
        session = self.sessions.writable(request)
        exported = asdict(self.exporter.export(session, request, self._between(request)))
        return {**exported, "directory": str(exported["directory"]) if exported["directory"] else None}

    def forget_policy(self, request: protocol.ForgetPolicy) -> dict[str, int]:
        """Remove every session of a policy, or with `only_ask` just check that none is open."""
        return self.sessions.delete(request.policy, request.only_ask)

    def probe(self, request: protocol.ProbeRevision) -> dict[str, Any]:
        """Compute the effect probe of a revision that no session trained."""
        between = self._between(request)
        return self.exporter.probe_revision(self.base, self.base_digest, request, between).to_json()

    def health(self) -> dict[str, Any]:
        """Return the known sessions' steps, the bytes in memory and their limit, and the queue's state.

        `parameter_bytes` has one value for each rank.
        """
        rows = self.sessions.rows()
        return {
            "parameter_bytes": self.base.parameter_bytes(),
            "sessions": {row["session"]: row["step"] for row in rows},
            "session_bytes": sum(row["bytes"] for row in rows if row["resident"]),
            "session_bytes_limit": self.sessions.budget,
            "queue": self.queue.state(""),
        }

    def close(self) -> None:
        """Stop the queue's thread after the running operation."""
        self.queue.close()


def is_brief(request: protocol.Request) -> bool:
    """Say whether an operation needs no pass through the model."""
    snapshot = isinstance(request, protocol.Export) and request.kind == "snapshot"
    return snapshot or isinstance(request, protocol.OptimStep | protocol.CloseSession)


def is_joinable(request: protocol.ForwardBackward) -> bool:
    """Say whether a call may share a pass with others: small, and the first of its step.

    Earlier gradients would be held twice for all sessions at once. Invalid data run alone.
    """
    batch = request.forward_backward_input
    if request.gathered or batch.router_replay or any(datum.routed_experts for datum in batch.data):
        return False
    with suppress(ConfigError):
        return is_small([example.row for example in examples_of(batch)])
    return False


def _outputs(logprobs: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    return [{"logprobs": {"data": row, "dtype": "float32"}} for row in logprobs]
