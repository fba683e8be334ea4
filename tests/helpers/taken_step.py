"""One step of the loop on samples and rewards that a test chooses, without services."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from engine.settings.policies import PolicyConfig
from engine.training import rollout_data
from engine.training.loop import grpo_step
from engine.training.rollout_data import Drawn, Judged
from engine.training.service.protocol import Datum, SessionInfo

METRICS = {"tokens": 1, "learned_tokens": 1}


def take_step(drawn: Drawn, judged: Judged, config: PolicyConfig) -> tuple[list[Datum], Mapping[str, Any]]:
    """Return what the trainer is sent for its gradients, and the step's row."""
    sent: list[Datum] = []
    left = iter(judged.rewards)

    def judge(answers: Any, whole: bool) -> Any:
        rewards = next(left)
        return SimpleNamespace(
            scores=rewards, errors=Counter({"raised KeyError": 1} if rewards is None else {})
        )

    def forward_backward(session: SessionInfo, data: list[Datum], *_: Any, **__: Any) -> dict[str, Any]:
        sent.extend(data)
        return {"metrics": METRICS}

    if not drawn.problems:
        drawn = replace(drawn, problems=[None] * len(drawn.groups))
    client = SimpleNamespace(
        forward_backward=forward_backward,
        optim_step=lambda session, adam, **_: {"step": session.step + 1, "grad_norm": 1.0},
        backpressure_s=defaultdict(float),
    )
    run: Any = SimpleNamespace(
        config=config,
        client=client,
        policy="sums",
        identity={},
        loss_settings={},
        line=SimpleNamespace(session="sums-1"),
        source=SimpleNamespace(replays=False, config=config),
        verifier=SimpleNamespace(judge=judge),
        ahead=SimpleNamespace(begin=lambda *_: None, take=lambda _: drawn),
        record=lambda row: None,
    )
    with patch.object(rollout_data, "REFILLS", 0):
        session = grpo_step(run, SessionInfo("sums-1", "sums", 0, 0, 1, "base", None, ()))
    return sent, session.history[-1]
