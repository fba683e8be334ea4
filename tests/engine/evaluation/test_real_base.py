"""A release on a real language model, decided by an evaluator alone: no user rates anything."""

import json
from collections.abc import Iterator

import pytest

from engine.ledger.ledger import open_snapshot
from tests.helpers.evaluated import POLICY, Live, Users, installation
from tests.helpers.repository import ROOT

# An engine starts, and two releases have a hundred users each on two cores.
pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.timeout(1800)]
FACTS = ROOT / "eval_suites" / "smollm2-135m" / "facts" / "train.jsonl"
# The share of an answer's words that questions and answers about facts have: an exact computation.
FLUENT = f"""
import json
from pathlib import Path

from engine.problems.language import words

ROWS = [json.loads(line) for line in Path({str(FACTS)!r}).read_text().splitlines()]
KNOWN = {{word.casefold() for row in ROWS for text in row.values() for word in words(text)}}

def score(question, answers, context):
    return [share([word.casefold() in KNOWN for word in words(answer)]) for answer in answers]

def share(known):
    return sum(known) / len(known) if known else 0.0
"""
# Tensors so large that a revision talks nonsense, and so small that it says what the base says.
NONSENSE, NEXT_TO_NOTHING = 1.0, 0.01


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    pytest.importorskip("gguf", reason="run `make real`")
    base, state = {"name": "smollm2-135m"}, tmp_path_factory.mktemp("real")
    with installation(state, FLUENT, (NONSENSE, NEXT_TO_NOTHING), base=base) as running:
        yield running


@pytest.mark.parametrize(("number", "state"), [(0, "rolled_back"), (1, "promoted")])
def test_an_evaluator_alone_finds_the_right_verdict(live: Live, number: int, state: str) -> None:
    rows = [json.loads(line) for line in FACTS.read_text().splitlines()]
    with Users(live, lambda user: str(rows[user % len(rows)]["question"])) as users:
        release = live.start(live.digests[number], {}, margin=0.2, shadow=400)
        ended = live.controller.wait_for_verdict(release, 800)
    assert ended["state"] == state, ended["reason"]
    assert "own" in ended["reason"]
    assert [one.fault for one in users.asked if one.fault] == []
    live.controller.publish_ledger()
    with open_snapshot(live.params.paths.ledger_snapshot) as ledger:
        query = "SELECT count(*) FROM observations WHERE policy = ? AND digest = ? AND purpose = 'user'"
        ((met,),) = ledger.execute(query, [POLICY, live.digests[number]]).fetchall()
        ((rated,),) = ledger.execute("SELECT count(*) FROM feedback").fetchall()
    # Nobody met the worse one: its shadow ended it.
    assert (met > 0, rated) == (state == "promoted", 0)
