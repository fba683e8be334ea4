"""Answers that are told whole: what is held back, how it is put together, and that nothing of it is left."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from engine.serving.plugin import register
from engine.serving.whole import WHOLE, Held, hold_back

ASKS, ASKS_NOT = ({WHOLE: 1}, None)
REQUESTS = {
    name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))
    for name, extra in (("rollout", ASKS), ("other", ASKS), ("chat", ASKS_NOT))
}


def told(request: str, token: int, ends: FinishReason | None = None, **fields) -> EngineCoreOutput:
    """Return what a step says of a request: a token, and its log-probability, minus a tenth of it."""
    logprobs = LogprobsLists(np.array([[token]]), np.array([[-token / 10]]), np.array([1]))
    return EngineCoreOutput(request, [token], logprobs, finish_reason=ends, **fields)


def test_a_request_is_told_once_and_others_at_every_step() -> None:
    held: Held = {}
    queued = EngineCoreEvent(EngineCoreEventType.QUEUED, 1.0)
    stats = PrefillStats()
    first = told("rollout", 5, events=[queued], prefill_stats=stats, routed_experts=np.array([[1], [2]]))
    assert hold_back([first, told("chat", 6)], held, REQUESTS) == [told("chat", 6)]
    assert (
        hold_back([told("rollout", 7, routed_experts=np.array([[3]])), told("other", 1)], held, REQUESTS)
        == []
    )
    last = told("rollout", 8, FinishReason.LENGTH, routed_experts=np.array([[4]]), stop_reason=None)
    (whole,) = hold_back([last], held, REQUESTS)
    assert (whole.new_token_ids, whole.finish_reason) == ([5, 7, 8], FinishReason.LENGTH)
    assert [column.ravel().tolist() for column in whole.new_logprobs[:3]] == [
        [5, 7, 8],
        [-0.5, -0.7, -0.8],
        [1, 1, 1],
    ]
    assert whole.routed_experts.ravel().tolist() == [1, 2, 3, 4]
    assert (whole.events, whole.prefill_stats) == ([queued], stats)
    assert list(held) == ["other"]


def test_one_token_is_told_as_it_is() -> None:
    only = told("rollout", 5, FinishReason.STOP)
    assert hold_back([only], {}, REQUESTS) == [only]


def test_a_request_that_fails_keeps_what_it_had() -> None:
    held: Held = {}
    hold_back([told("rollout", 5)], held, REQUESTS)
    (whole,) = hold_back([EngineCoreOutput("rollout", [], finish_reason=FinishReason.ERROR)], held, REQUESTS)
    assert (whole.new_token_ids, whole.finish_reason, held) == ([5], FinishReason.ERROR, {})


def test_what_is_called_off_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    request = SimpleNamespace(request_id="rollout")
    scheduler = SimpleNamespace(graftwork_held={"rollout": [told("rollout", 5)], "other": []})
    # Behind the patch, what vLLM does: it returns the requests that it has ended.
    stock = Scheduler.finish_requests.__wrapped__
    closure = next(c for c in Scheduler.finish_requests.__closure__ if c.cell_contents is stock)
    monkeypatch.setattr(closure, "cell_contents", lambda *_: [request])
    assert Scheduler.finish_requests(scheduler, "rollout", RequestStatus.FINISHED_ABORTED) == [request]
    assert list(scheduler.graftwork_held) == ["other"]
