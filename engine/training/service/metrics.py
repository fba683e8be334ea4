"""What Prometheus reads of the trainer: counts since its start, and the last step of every open policy.

A policy is a label only while it has a session in memory, so that labels stay as few as sessions. Steps come
with the record that their client gave: whatever of it is no number is passed over. Knows nothing of HTTP.
"""

import math
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from torch import Tensor

from engine.problems.verifiers import FAULTS
from engine.training.model.adapter import Adapter
from engine.training.service.queue import Queue
from engine.training.service.session import Session
from engine.training.service.train_step import GAUGES, SECONDS

# What a step's seconds were spent on: `<phase>_s` of its row.
PHASES = tuple(name.removesuffix("_s") for name in SECONDS)
# Why tokens are left out: `masks` of corrections.py, and answers without their experts. A record may hold
# other names, but a client must not make labels.
MASKS = ("outlier", "geometric", "icepop", "router_replay")
BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class TrainerMetrics:
    """Counts of one trainer's life; used by its thread, rendered by any."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"graftwork_trainer_{name}", what, labels, registry=self.registry)

        self.operations = counter("operations", "Operations that ended.", "kind", "outcome")
        self.seconds = Histogram(
            "graftwork_trainer_operation_seconds", "Seconds of an operation, its wait left out.", ["kind"],
            registry=self.registry, buckets=BUCKETS_S,
        )  # fmt: skip
        self.fused = counter("fused_operations", "Operations that shared a pass of the base with others.")
        self.unfused = counter("failed_passes", "Shared passes that failed; their operations took turns.")
        self.steps = counter("steps", "Training steps of all policies.")
        self.tokens = counter("tokens", "Tokens that were trained on.")
        self.masked = counter("masked_tokens", "Tokens that a correction or a route left out.", "reason")
        self.faults = counter("verifier_faults", "Answers that a verifier failed on.", "kind")
        self.phases = counter("step_seconds", "Seconds of training steps by what they went to.", "phase")

    def timed(self, work: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the same work, counted by its name and by how it ended: `done`, or the error's name."""

        def counted(request: Any) -> Any:
            began, outcome = time.monotonic(), "done"
            try:
                return work(request)
            except BaseException as error:
                # Counted whatever it is; it goes on to whoever asked.
                outcome = type(error).__name__
                raise
            finally:
                self.observe_operation(work.__name__, time.monotonic() - began, outcome)

        return counted

    def observe_operation(self, kind: str, seconds: float, outcome: str = "done") -> None:
        self.operations.labels(kind, outcome).inc()
        self.seconds.labels(kind).observe(seconds)

    def observe_step(self, row: Mapping[str, Any]) -> None:
        """Count a step, given its row of the ledger's `train_steps`."""
        masked, faults = _counts(row, "masked"), _counts(row, "verifier_faults")
        self.steps.inc()
        self.tokens.inc(_count(row, "tokens"))
        for reason in MASKS:
            self.masked.labels(reason).inc(_count(masked, reason))
        for kind in FAULTS:
            named = [fault for fault in faults if fault.partition(" ")[0] == kind]
            self.faults.labels(kind).inc(sum(_count(faults, fault) for fault in named))
        for phase in PHASES:
            self.phases.labels(phase).inc(_count(row, f"{phase}_s"))

    def render(self, sessions: Iterable[Session], queue: Queue) -> bytes:
        """Return all of it as Prometheus' text; of two sessions of one policy the later one speaks."""
        held = list(sessions)
        now = CollectorRegistry()

        def gauge(name: str, what: str, *labels: str) -> Gauge:
            return Gauge(f"graftwork_{name}", what, labels, registry=now)

        gauge("trainer_sessions", "Sessions in memory.").set(len(held))
        size = gauge("trainer_session_bytes", "Bytes of all sessions' factors, gradients and moments.")
        size.set(sum(adapter_bytes(session.adapter) for session in held))
        gauge("trainer_queued_operations", "Operations that wait or run.").set(queue.unfinished)
        refused = Counter("graftwork_trainer_refused", "Operations that a full queue refused.", registry=now)
        refused.inc(queue.refused)
        gauge("trainer_peak_memory_bytes", "Most memory that the trainer ever held.").set(peak_memory())
        newest = {session.policy: session.history[-1] for session in held if session.history}
        for name, what in GAUGES.items():
            last = gauge(f"policy_{name}", what, "policy")
            for policy, row in newest.items():
                if isinstance(row.get(name), int | float):
                    last.labels(policy).set(row[name])
        return generate_latest(self.registry) + generate_latest(now)


def peak_memory() -> int:
    """Return the most bytes that this process has held: of a GPU's memory where it uses one, else of RAM."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    # Linux counts in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def adapter_bytes(adapter: Adapter) -> int:
    """Return the bytes of an adapter's factors, and of the gradients and Adam moments that there are."""
    factors = list(adapter.factors.values())
    states = [list(adapter.optimizer.state.get(factor, {}).values()) for factor in factors]
    held = [*factors, *(factor.grad for factor in factors), *(value for state in states for value in state)]
    return sum(tensor.nbytes for tensor in held if isinstance(tensor, Tensor))


def _counts(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = row.get(name)
    return value if isinstance(value, dict) else {}


def _count(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return max(0.0, value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
