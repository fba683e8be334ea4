"""Scoring a part of a suite: it ends early, asks for no item twice, and the gate judges by what it showed."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engine.errors import Conflict
from engine.ledger.estimates import newest_estimates
from engine.ledger.ledger import Ledger, open_snapshot
from engine.settings.params import Params
from engine.settings.services import EngineConfig
from tasks.part_score import PartScore, score_part
from tasks.score import score
from tasks.suites import build_suite, load_suite
from tests.helpers.json_server import JsonAnswers

BASE, PARENT, CHILD, KEY = "b" * 64, "c" * 64, "d" * 64, "gw-" + "0" * 40
# After whatever the tests score.
MADE = 1e12
Answer = Callable[[str, str], str]


class Engine(ThreadingHTTPServer):
    """Answers as `answer(model, prompt)` says, and keeps what it was asked for."""

    def __init__(self, answer: Answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.asked = answer, list[tuple[str, str]]()


class Handler(JsonAnswers, BaseHTTPRequestHandler):
    server: Engine

    def do_GET(self) -> None:
        self.reply({"plugin": "0.1.0", "base": BASE})

    def do_POST(self) -> None:
        body = self.body()
        self.server.asked += [(body["model"], prompt) for prompt in body["prompt"]]
        texts = [self.server.answer(body["model"], prompt) for prompt in body["prompt"]]
        self.reply({"choices": [{"index": place, "text": text} for place, text in enumerate(texts)]})


@pytest.fixture
def suites(tmp_path: Path) -> Path:
    build_suite("sums", "addition", "terse", "<|user|>{}<|assistant|>".format, root=tmp_path / "suites")
    return tmp_path / "suites"


@pytest.fixture
def engine(suites: Path) -> Iterator[Engine]:
    """The parent is wrong in one item of four; the child too, or more where a test says so."""
    items = {item.prompt: item for item in load_suite("sums", suites).items}

    def answer(model: str, prompt: str) -> str:
        item = items[prompt]
        wrong = {model: int(item.id) % 4 == 0, **server.also_wrong(int(item.id))}
        return "none" if wrong[model] else item.answer

    server = Engine(answer)
    server.also_wrong = lambda number: {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def params(tmp_path: Path, engine: Engine, suites: Path) -> Params:
    service = EngineConfig(port=engine.server_address[1], max_num_seqs=16)
    return Params(state_dir=tmp_path / "state", engine=service, suites_dir=suites)


def part(params: Params, target: str = "suite") -> PartScore:
    return score_part(params, "p", CHILD, score(params, "p", PARENT, "sums", KEY), KEY, target, MADE)


def ingest(params: Params) -> None:
    ledger = Ledger(params.paths.ledger)
    ledger.ingest(params.paths.spool)
    ledger.snapshot(params.paths.ledger_snapshot)
    ledger.close()


def test_an_equal_revision_is_passed_after_a_part_of_the_items_and_no_item_is_asked_for_twice(
    engine: Engine, params: Params
) -> None:
    found = part(params)
    asked = [prompt for model, prompt in engine.asked if model == f"p@{CHILD[:12]}"]
    assert not found.has_fallen
    assert found.own.items == len(asked) == len(set(asked)) < found.own.available == 200
    assert found.own.low <= 0.75 <= found.own.high
    assert found.difference.low <= 0 <= found.difference.high
    assert found.difference.low > -params.release.score_margin


@pytest.mark.parametrize("target", ["suite", "task"])
def test_a_much_worse_revision_is_told_early(engine: Engine, params: Params, target: str) -> None:
    engine.also_wrong = lambda number: {f"p@{CHILD[:12]}": number % 2 == 0}
    found = part(params, target)
    assert found.has_fallen
    assert found.own.items < 150
    assert found.difference.target == found.own.target == target


def test_what_was_read_is_no_score_and_the_estimates_are_kept_once(params: Params) -> None:
    found = part(params)
    ingest(params)
    again = part(params)
    ingest(params)
    with open_snapshot(params.paths.ledger_snapshot) as ledger:
        counts = "SELECT count(*) FROM {} WHERE digest = '" + CHILD + "'"
        scores, readings = (
            ledger.execute(counts.format(table)).fetchone()[0] for table in ("scores", "readings")
        )
        known = [one for one in newest_estimates(ledger, BASE, "p", "sums") if one.digest == CHILD]
    assert (scores, readings) == (0, found.own.items)
    assert again.own.mean == found.own.mean
    assert {one.against for one in known} == {None, PARENT}


def test_a_baseline_of_another_version_is_refused(params: Params) -> None:
    baseline = replace(score(params, "p", None, "sums", KEY), suite_version="2")
    with pytest.raises(Conflict, match="version 2"):
        score_part(params, "p", CHILD, baseline, KEY, "suite", MADE)
