"""Sampled flips: which items are sampled, what is said of them, and that a real engine says it twice."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.base.families import BaseShapes
from engine.catalog.catalog import Catalog, migrate
from engine.catalog.records import split_served_name
from engine.clients.engine import EngineClient
from engine.errors import ConfigError
from engine.problems.procedural import Problem
from engine.settings.params import BaseConfig, Params
from engine.settings.policies import PolicyConfig
from engine.settings.services import EngineConfig
from tasks.flips import sampled_flips
from tasks.suites import freeze
from tests.helpers.live import RunningEngine
from tests.helpers.parity import RANK, random_adapter
from tests.helpers.rows import NEW, OLD, fill

SAMPLES = 16
# By item: the chances of success of NEW and OLD, and the probability of their greedy answers.
CHANCES = {
    0: (0.95, 0.05, 0.6),
    1: (0.05, 0.95, 0.6),
    2: (0.5, 0.5, 0.6),
    3: (1.0, 1.0, 0.99),
    4: (1.0, 0.0, 0.99),
}


def settings(root: Path, verifier: str = "exact", **changes: Any) -> Params:
    problems = [Problem("own", f"Say {number}.", "yes") for number in CHANCES]
    freeze("own", "own", {"verifier": verifier}, problems, "{}".format, 1, 8, root / "suites")
    policy = PolicyConfig(task="own.jsonl", suite="own", verifier="exact")
    return Params(suites_dir=root / "suites", policies={"sorting": policy, "flipped": policy}, **changes)


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """A champion NEW with a predecessor OLD, and an engine that answers by `CHANCES`."""
    params = settings(tmp_path, state_dir=tmp_path / "state")
    migrate(params.paths.catalog_url)
    with Catalog(params.paths.catalog_url) as catalog:
        fill(catalog)
        route = catalog.routes.get("sorting")
        catalog.routes.update(replace(route, champion=NEW, previous=OLD), route.version)
    asked: list[dict[str, Any]] = []

    def samples(_client: EngineClient, body: dict[str, Any]) -> dict[str, Any]:
        asked.append(body)
        which, random = int(body["model"] == f"sorting@{OLD[:12]}"), np.random.default_rng(body["seed"])
        groups = []
        for (number,) in body["prompts"]:
            *chances, sure = CHANCES[number]
            drawn = random.random(body["n"]) if body["temperature"] else [0.5 - 1e-9]
            texts = ["yes" if one < chances[which] else "no" for one in drawn]
            groups.append({"samples": [{"text": text, "logprobs": [np.log(sure), 0.0]} for text in texts]})
        return {"groups": groups}

    monkeypatch.setattr(EngineClient, "samples", samples)
    monkeypatch.setattr(EngineClient, "asked", asked, raising=False)
    monkeypatch.setattr("tasks.flips.ensure_base", lambda *_: SimpleNamespace(path=None))
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [int(text[4:-1])])
    monkeypatch.setattr("tasks.flips.tokenizer_of", lambda _: tokenizer)
    return params


def test_uncertain_and_changed_items_are_sampled_and_flips_named(params: Params) -> None:
    found = sampled_flips(params, "sorting", NEW, SAMPLES, "")
    greedy, _, sampled, others = EngineClient.asked
    assert (greedy["temperature"], greedy["n"], greedy["prompts"]) == (0.0, 1, [[n] for n in CHANCES])
    # Item 3 is certain for both, and right.
    assert sampled["prompts"] == others["prompts"] == [[0], [1], [2], [4]]
    assert (sampled["temperature"], sampled["n"]) == (1.0, SAMPLES)
    # Equal seeds would make the two revisions' samples one draw.
    assert sampled["seed"] != others["seed"]
    facts = {one["item"]: one for one in found.facts["flips"]}
    assert facts.keys() == {"0000", "0001", "0004"}
    assert (facts["0004"]["successes"], facts["0004"]["other_successes"]) == (SAMPLES, 0)
    assert "- lost 0001: `Say 1.` → " in found.says
    assert f"on 3 the chance of success differs from that of the previous champion {OLD[:12]}" in found.says
    assert sampled_flips(params, "sorting", NEW, SAMPLES, "") == found


def test_a_suite_without_a_verifier_of_answers_is_refused(params: Params) -> None:
    settings(params.suites_dir.parent / "other", "likelihood")
    other = params.model_copy(update={"suites_dir": params.suites_dir.parent / "other/suites"})
    with pytest.raises(ConfigError, match="no verifier of answers"):
        sampled_flips(other, "sorting", NEW, SAMPLES, "")


def test_a_real_engine_says_the_same_twice(engine: RunningEngine, tmp_path: Path) -> None:
    """Of a revision that writes at random, beside the base."""
    made = engine.publish("flipped", random_adapter(BaseShapes.read(engine.base_path).modules(), 9), RANK)
    port = int(engine.url.rpartition(":")[2])
    params = settings(
        tmp_path,
        state_dir=engine.state,
        base=BaseConfig(name=str(engine.base_path)),
        engine=EngineConfig(port=port),
    )
    policy, digest = split_served_name(made)
    first, second = (sampled_flips(params, policy, str(digest), 4, engine.key) for _ in range(2))
    assert first == second
    assert (first.facts["sampled"], first.facts["against"]) == (len(CHANCES), None)
