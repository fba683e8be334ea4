"""The trainer's Prometheus metrics: counts since its start, and the last step of every policy in memory.

A policy is a label only while it has a session in memory, which bounds the number of labels. Step rows come
from clients: values that are not numbers are skipped.
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

# Phases of a step: `<phase>_s` in its row.
PHASES = tuple(name.removesuffix("_s") for name in SECONDS)
# Reasons for masked tokens: `masks` of objective.py, and router replay. A client's record may hold other
# names, which must not become labels.
MASKS = ("outlier", "geometric", "icepop", "router_replay")
BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class TrainerMetrics:
    """Metrics of one trainer process; updated by its thread, rendered by any."""

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
        """Wrap `work` to count it by name and outcome: `done`, or the error's class."""

        def counted(request: Any) -> Any:
            began, outcome = time.monotonic(), "done"
            try:
                return work(request)
            except BaseException as error:
                # Every error is counted and raised again.
                outcome = type(error).__name__
                raise
            finally:
                self.observe_operation(work.__name__, time.monotonic() - began, outcome)

        return counted

    def observe_operation(self, kind: str, seconds: float, outcome: str = "done") -> None:
        """Count an operation and its seconds."""
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
        """Return all metrics in Prometheus' text format; of two sessions of one policy the later counts."""
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
        newest = {session.policy: session.row for session in held if session.row}
        for name, what in GAUGES.items():
            last = gauge(f"policy_{name}", what, "policy")
            for policy, row in newest.items():
                if isinstance(row.get(name), int | float):
                    last.labels(policy).set(row[name])
        return generate_latest(self.registry) + generate_latest(now)


def peak_memory() -> int:
    """Return this process's peak memory in bytes: GPU memory when it uses one, else RAM."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    # Linux reports KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def adapter_bytes(adapter: Adapter) -> int:
    """Return the bytes of an adapter's factors, gradients and Adam moments."""
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
