"""The trainer's metrics: what Prometheus' own parser reads of them equals what was put in."""

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from engine.errors import Busy, Conflict
from engine.problems.verifiers import FAULTS
from engine.settings.losses import CORRECTIONS, LossConfig
from engine.training.loss.grpo import Tokens
from engine.training.loss.objective import BatchMetrics, masks
from engine.training.model.lora import ResidentBase
from engine.training.model.packing import Example, TokenRow
from engine.training.service.metrics import MASKS, PHASES, TrainerMetrics, adapter_bytes, peak_memory
from engine.training.service.protocol import AdamParams, CreateSession, OptimStep, Request
from engine.training.service.queue import Operation, Queue
from engine.training.service.session import Session
from engine.training.service.train_step import GAUGES
from tests.helpers.history import step_row
from tests.helpers.training_pass import gather

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue(of_line=2, of_all=8, perform=lambda operations: operations[0].perform())
    yield queue
    queue.close()


@pytest.fixture(scope="module")
def base(tiny_base) -> ResidentBase:
    return ResidentBase(tiny_base, threads=1, microbatch_tokens=256)


def parsed(text: bytes) -> Samples:
    families = list(text_string_to_metric_families(text.decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    found = [(sample.name, tuple(sorted(sample.labels.items())), sample.value)
             for family in families for sample in family.samples]  # fmt: skip
    assert len({(name, labels) for name, labels, _ in found}) == len(found)
    return {(name, labels): value for name, labels, value in found}


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"graftwork_{name}", tuple(sorted(labels.items()))]


def session(base: ResidentBase, directory, name: str, policy: str, rows: Iterable[dict] = ()) -> Session:
    request = CreateSession(
        request_id="open", session=name, policy=policy, rank=4, alpha=8.0, targets=["q_proj", "down_proj"],
        seed=3, holder="me",
    )  # fmt: skip
    opened = Session(directory / name, base, "b" * 64, request)
    for row in rows:
        gather(opened, [Example(TokenRow((5, 6, 7, 8), 2), (-2.0, -2.0), (1.0, 1.0))])
        opened.optim_step(
            OptimStep(
                request_id=str(row["step"]), session=name, fence=0, adam_params=AdamParams(), record=row
            )
        )
    return opened


def test_the_last_step_of_every_open_policy_is_a_gauge(base, tmp_path, queue):
    words = session(base, tmp_path, "words-1", "words", [step_row(1, "words"), step_row(2, "words")])
    sums = session(base, tmp_path, "sums-1", "sums", [step_row(1)])
    fresh = session(base, tmp_path, "fresh-1", "fresh")
    metrics = TrainerMetrics()
    seen = parsed(metrics.render([words, sums, fresh], queue))
    for policy, held in (("words", words), ("sums", sums)):
        for name in GAUGES:
            assert value(seen, f"policy_{name}", policy=policy) == held.history[-1][name], name
    assert {dict(labels).get("policy") for _, labels in seen} == {None, "words", "sums"}
    assert value(seen, "trainer_sessions") == 3
    # Closed: its label is gone.
    seen = parsed(metrics.render([sums], queue))
    assert {dict(labels).get("policy") for _, labels in seen} == {None, "sums"}


def test_of_two_lines_of_one_policy_the_later_one_speaks(base, tmp_path, queue):
    old = session(base, tmp_path, "old", "sums", [step_row(1, reward=0.25)])
    new = session(base, tmp_path, "new", "sums", [step_row(1, reward=0.75)])
    seen = parsed(TrainerMetrics().render([old, new], queue))
    assert value(seen, "policy_reward", policy="sums") == 0.75


def test_bytes_are_factors_gradients_and_moments(base, tmp_path, queue):
    fresh = session(base, tmp_path, "fresh", "sums")
    factors = sum(factor.numel() for factor in fresh.adapter.factors.values())
    assert adapter_bytes(fresh.adapter) == 4 * factors
    gather(fresh, [Example(TokenRow((5, 6, 7, 8), 2), (-2.0, -2.0), (1.0, 1.0))])
    assert adapter_bytes(fresh.adapter) == 2 * 4 * factors
    trained = session(base, tmp_path, "trained", "words", [step_row(1)])
    # Two moments of each number, and Adam's count of steps for each factor.
    counts = 4 * len(trained.adapter.factors)
    gradients = sum(f.grad.nbytes for f in trained.adapter.factors.values() if f.grad is not None)
    assert adapter_bytes(trained.adapter) == 3 * 4 * factors + counts + gradients
    seen = parsed(TrainerMetrics().render([fresh, trained], queue))
    expected = adapter_bytes(fresh.adapter) + adapter_bytes(trained.adapter)
    assert value(seen, "trainer_session_bytes") == expected


def test_steps_add_up_and_what_is_no_number_is_passed_over(queue):
    metrics = TrainerMetrics()
    masked = {"outlier": 3, "router_replay": 5}
    rows = [
        step_row(1, masked=masked),
        step_row(2, "words", masked=masked, wait_s=2.0),
        step_row(3, "words", masked=None),
    ]
    strange = {
        "tokens": "many",
        "wait_s": float("nan"),
        "update_s": -1.0,
        "masked": {"icepop": None, "of a client": 7},
        "verifier_faults": {"timeout": -1, "of a client": 7},
        "reward": None,
    }
    for row in (*rows, strange, {}):
        metrics.observe_step(row)
    seen = parsed(metrics.render([], queue))
    assert value(seen, "trainer_steps_total") == 5
    assert value(seen, "trainer_tokens_total") == sum(row["tokens"] for row in rows)
    counted = {reason: value(seen, "trainer_masked_tokens_total", reason=reason) for reason in MASKS}
    assert counted == {"outlier": 2 * 3, "geometric": 0, "icepop": 0, "router_replay": 2 * 5}
    failed = {kind: value(seen, "trainer_verifier_faults_total", kind=kind) for kind in FAULTS}
    assert failed == dict.fromkeys(FAULTS, 0) | {"raised": 3 * 2, "timeout": 3 * 1}
    for phase in PHASES:
        expected = sum(row[f"{phase}_s"] for row in rows)
        assert value(seen, "trainer_step_seconds_total", phase=phase) == pytest.approx(expected, rel=1e-12)


def test_operations_are_counted_by_kind_and_outcome(queue):
    metrics = TrainerMetrics()

    def export(request: int) -> int:
        if request < 0:
            raise Conflict("no")
        return request + 1

    work = metrics.timed(export)
    assert [work(1), work(2)] == [2, 3]
    with pytest.raises(Conflict):
        work(-1)
    metrics.observe_operation("probe", 20.0)
    seen = parsed(metrics.render([], queue))
    assert value(seen, "trainer_operations_total", kind="export", outcome="done") == 2
    assert value(seen, "trainer_operations_total", kind="export", outcome="Conflict") == 1
    assert value(seen, "trainer_operation_seconds_count", kind="export") == 3
    assert value(seen, "trainer_operation_seconds_sum", kind="probe") == 20
    assert value(seen, "trainer_operation_seconds_bucket", kind="probe", le="30.0") == 1
    assert value(seen, "trainer_operation_seconds_bucket", kind="probe", le="10.0") == 0


def test_every_metric_of_a_batch_has_its_place_in_a_steps_row():
    # The ledger refuses a row with a column that it does not know: `test_ledger` puts this very row in.
    assert {field.name for field in fields(BatchMetrics)} | set(GAUGES) <= set(step_row(1))
    assert {f"{phase}_s" for phase in PHASES} <= set(step_row(1))


def test_every_correction_that_masks_has_its_label():
    ratio_T = torch.tensor([1.0, 1e9])
    tokens = Tokens(
        torch.log(ratio_T), torch.zeros(2), torch.ones(2), torch.tensor([0, 1]), 2, torch.full((2,), 0.5)
    )
    every = LossConfig.model_validate(dict.fromkeys(CORRECTIONS, True))
    assert {*masks(tokens, tokens.new_T, every), "router_replay"} == set(MASKS)


def test_what_waits_runs_and_was_refused_is_counted(queue):
    go = threading.Event()
    for number in range(3):
        queue.submit(Operation(Request(request_id=f"{number}"), "a", lambda _: go.wait(20)))
        # The first one runs, and takes no place of those that wait.
        until = time.monotonic() + 20
        while not number and queue.waiting("a") and time.monotonic() < until:
            time.sleep(0.01)
    for number in range(2):
        with pytest.raises(Busy):
            queue.submit(Operation(Request(request_id=f"more-{number}"), "a", lambda _: None))
    seen = parsed(TrainerMetrics().render([], queue))
    go.set()
    assert value(seen, "trainer_queued_operations") == 3
    assert value(seen, "trainer_refused_total") == 2


def test_peak_memory_is_what_the_kernel_says():
    before, held = peak_memory(), torch.ones(64 << 20, dtype=torch.uint8)
    lines = Path("/proc/self/status").read_text().splitlines()
    kernel = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    assert before <= peak_memory()
    assert held.nbytes < peak_memory() == pytest.approx(kernel, rel=0.01)
