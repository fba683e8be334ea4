"""Answers that are told whole: what is held back, how it is put together, and that nothing of it is left."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
)
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, SamplingMaskLists
from vllm.v1.request import RequestStatus

from engine.serving.vllm_plugin.coalesced_output import Held, coalesce
from engine.serving.vllm_plugin.extra_args import COALESCED
from engine.serving.vllm_plugin.plugin import register


def asking(name: str, extra: dict[str, Any] | None) -> Any:
    """Return a request with these extra arguments."""
    return SimpleNamespace(request_id=name, sampling_params=SimpleNamespace(extra_args=extra))


def told(request: str, token: int, ends: FinishReason | None = None, **fields) -> EngineCoreOutput:
    """Return what a step says of a request: a token, and its log-probability, minus a tenth of it."""
    logprobs = LogprobsLists(np.array([[token]]), np.array([[-token / 10]]), np.array([1]))
    return EngineCoreOutput(request, [token], logprobs, finish_reason=ends, **fields)


def test_a_request_is_told_once_and_others_at_every_step() -> None:
    held: Held = {"rollout": [], "other": []}
    queued = EngineCoreEvent(EngineCoreEventType.QUEUED, 1.0)
    stats = PrefillStats()
    first = told("rollout", 5, events=[queued], prefill_stats=stats, routed_experts=np.array([[1], [2]]))
    assert coalesce([first, told("chat", 6)], held) == [told("chat", 6)]
    assert coalesce([told("rollout", 7, routed_experts=np.array([[3]])), told("other", 1)], held) == []
    last = told("rollout", 8, FinishReason.LENGTH, routed_experts=np.array([[4]]), stop_reason=None)
    (whole,) = coalesce([last], held)
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
    assert coalesce([only], {"rollout": []}) == [only]


def wide(token: int, columns: int) -> EngineCoreOutput:
    """Return an output beside a request that wants more alternatives: the sampled token is the first."""
    alternatives = np.arange(token, token + columns)[None]
    return EngineCoreOutput(
        "rollout", [token], LogprobsLists(alternatives, -alternatives / 10, np.array([1]))
    )


def test_another_request_may_want_more_columns() -> None:
    held: Held = {"rollout": []}
    coalesce([wide(5, 1)], held)
    coalesce([wide(6, 4)], held)
    last = wide(7, 2)
    last.finish_reason = FinishReason.STOP
    (whole,) = coalesce([last], held)
    assert whole.new_logprobs.logprob_token_ids.tolist() == [[5], [6], [7]]
    assert whole.new_logprobs.logprobs.tolist() == [[-0.5], [-0.6], [-0.7]]


def test_what_is_said_of_the_prompt_is_kept() -> None:
    held: Held = {"rollout": []}
    prompt, chosen = LogprobsTensors.empty_cpu(3, 1), torch.ones(3, 1)
    first = told("rollout", 5, new_prompt_logprobs_tensors=prompt, prompt_token_id_logprobs=chosen)
    coalesce([first], held)
    (whole,) = coalesce([told("rollout", 6, FinishReason.STOP)], held)
    assert whole.new_prompt_logprobs_tensors is prompt
    assert whole.prompt_token_id_logprobs is chosen


def test_a_mask_of_what_could_be_sampled_is_not_held_back() -> None:
    output = told("rollout", 5, new_sampling_mask=SamplingMaskLists(np.array([5])))
    assert coalesce([output], {"rollout": []}) == [output]


def patched(monkeypatch: pytest.MonkeyPatch, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of the scheduler with our patch around something else than vLLM's."""
    register()
    method = getattr(Scheduler, name)
    cell = next(c for c in method.__closure__ if c.cell_contents is method.__wrapped__)
    monkeypatch.setattr(cell, "cell_contents", stock)
    return method


def test_what_fails_in_a_step_is_told_with_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(request_id="rollout")
    finish = patched(monkeypatch, "finish_requests", lambda *_: [failed])

    def step(scheduler: Any, *_: Any) -> dict[int, EngineCoreOutputs]:
        # As vLLM's step ends what a worker gave up.
        finish(scheduler, {"rollout"}, RequestStatus.FINISHED_ERROR)
        error = EngineCoreOutput("rollout", [], finish_reason=FinishReason.ERROR)
        return {0: EngineCoreOutputs(outputs=[error])}

    update = patched(monkeypatch, "update_from_output", step)
    held = {"rollout": [told("rollout", 5)], "other": [told("other", 6)]}
    scheduler = SimpleNamespace(graftwork_held=held)
    (whole,) = update(scheduler, None, None)[0].outputs
    assert (whole.new_token_ids, whole.finish_reason) == ([5], FinishReason.ERROR)
    assert list(scheduler.graftwork_held) == ["other"]


def test_what_is_called_off_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    request = SimpleNamespace(request_id="rollout")
    finish = patched(monkeypatch, "finish_requests", lambda *_: [request])
    scheduler = SimpleNamespace(graftwork_held={"rollout": [told("rollout", 5)], "other": []})
    assert finish(scheduler, "rollout", RequestStatus.FINISHED_ABORTED) == [request]
    assert list(scheduler.graftwork_held) == ["other"]


@pytest.mark.parametrize(("extra", "held"), [({COALESCED: 1}, ["rollout"]), ({COALESCED: 0}, []), (None, [])])
def test_only_a_request_that_asks_is_held_back(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any] | None, held: list[str]
) -> None:
    add = patched(monkeypatch, "add_request", lambda *_: None)
    scheduler = SimpleNamespace(requests={"rollout": None})
    add(scheduler, asking("rollout", extra))
    assert list(vars(scheduler).get("graftwork_held", ())) == held
