"""The suite `general`: its windows, the perplexity that they give, and that it is scored once."""

import math
from pathlib import Path
from typing import Any

import pytest

from engine.clients.engine import EngineClient
from engine.errors import ConfigError
from engine.ledger.ledger import Ledger
from engine.problems.general_text import WINDOW, WINDOWS, general_text, text_digest, windows_of
from engine.quality.estimate import perplexity
from engine.settings.params import BaseConfig, Params
from engine.settings.services import EngineConfig
from tasks.general import score_general
from tasks.policies import create_policy
from tests.helpers.live import RunningEngine

DIGEST = "d" * 64


def test_windows_are_of_one_length_spread_over_the_text_and_never_overlap() -> None:
    found = windows_of(range(WINDOW * 1000 + 17))
    assert len(found) == WINDOWS
    assert WINDOWS * WINDOW == 10_000
    assert {len(window) for window in found} == {WINDOW}
    assert [window[0] for window in found] == [number * 20 * WINDOW for number in range(WINDOWS)]
    # A text that is too short gives what it has, once.
    assert windows_of(range(WINDOW * 3 - 1)) == [tuple(range(200)), tuple(range(200, 400))]
    assert windows_of(range(WINDOW - 1)) == []


def test_the_text_is_long_enough_for_any_tokenizer_and_its_digest_is_the_version() -> None:
    # No tokenizer has tokens of ten characters on average.
    assert len(general_text()) > 10 * WINDOWS * WINDOW
    assert len(text_digest()) == 64


def test_perplexity_is_that_of_all_tokens_together() -> None:
    logprobs = [[-1.0, -3.0], [-0.5, -2.5], [-4.0, 0.0]]
    scores = [math.exp(sum(window) / 2) for window in logprobs]
    assert perplexity(scores) == pytest.approx(math.exp(-sum(map(sum, logprobs)) / 6))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What the engine is asked for: the base's tokens have 1 nat each, any other model's 2."""
    seen: list[tuple[str, int]] = []

    def logprobs(self: EngineClient, model: str, tokens: Any) -> list[float]:
        assert self.http.headers["x-graftwork-purpose"] == "score"
        seen.append((model, len(tokens)))
        return [-1.0 if model == "the-base" else -2.0] * (len(tokens) - 1)

    monkeypatch.setattr(EngineClient, "logprobs", logprobs)
    monkeypatch.setattr(EngineClient, "marker", lambda self: {"base": "b" * 64, "base_name": "the-base"})
    return seen


@pytest.mark.long
def test_base_and_revision_are_scored_once_and_the_ledger_has_the_windows(
    asked: list[tuple[str, int]], tiny_base: Path, tmp_path: Path
) -> None:
    params = Params(state_dir=tmp_path, base=BaseConfig(name=str(tiny_base)))
    base, revision = (score_general(params, "sums", digest, "key") for digest in (None, DIGEST))
    assert (base.value, revision.value) == (pytest.approx(math.e), pytest.approx(math.e**2))
    assert asked == [("the-base", WINDOW)] * WINDOWS + [("sums@dddddddddddd", WINDOW)] * WINDOWS
    ledger = Ledger(params.paths.ledger)
    assert ledger.ingest(params.paths.spool) == 2 * WINDOWS
    ledger.snapshot(params.paths.ledger_snapshot)
    found = ledger.connection.execute("SELECT DISTINCT suite, suite_version FROM scores").fetchall()
    assert found == [("general", text_digest()[:12])]
    ledger.close()
    # The base's scores are those of any policy.
    again = score_general(params, "others", None, "key")
    assert (again.reused, again.value) == (True, base.value)
    assert len(asked) == 2 * WINDOWS


def test_the_live_engine_gives_the_perplexity_that_transformers_gives(
    engine: RunningEngine, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    live = EngineConfig(port=int(engine.url.rpartition(":")[2]))
    params = Params(state_dir=tmp_path, base=BaseConfig(name=str(engine.base_path)), engine=live)
    found = score_general(params, "sums", None, engine.key)
    tokenizer = AutoTokenizer.from_pretrained(engine.base_path)
    model = AutoModelForCausalLM.from_pretrained(engine.base_path, dtype=torch.float32)
    tokens = torch.tensor(windows_of(tokenizer.encode(general_text(), add_special_tokens=False)))
    with torch.no_grad():
        # The mean over all tokens: windows are of one length.
        loss = model(input_ids=tokens, labels=tokens).loss.item()
    assert (found.windows, found.reused) == (WINDOWS, False)
    assert found.value == pytest.approx(math.exp(loss), rel=1e-4)


def test_no_policy_may_take_the_suites_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'general'.*suite"):
        create_policy(Params(state_dir=tmp_path, suites_dir=tmp_path), "general", tmp_path / "d", "exact")
