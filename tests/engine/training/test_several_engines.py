"""A step's rollouts over several engines: cut, handed on, the same tokens; and two live ones, one killed."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.catalog.catalog import Catalog, Replica, migrate
from engine.catalog.fleet import Fleet
from engine.errors import ConfigError, NotFound, ServiceError
from engine.threads import background
from engine.training import several_engines
from engine.training.line_of_training import Line
from engine.training.rollout_data import Source
from engine.training.sample_groups import Sample, Sampling, sample_groups
from engine.training.several_engines import Engines, sample_over
from tests.helpers.live import eventually, free_port, start_engine, stop_engine

SAMPLING = Sampling(group_size=3, max_tokens=4, seed=11, timeout_s=30, patience_s=60)
PROMPTS = [[40 + number, 50] for number in range(7)]
Fault = Callable[["Fake", Any], int | None]


class Fake:
    """An engine at the HTTP boundary: a sample's tokens follow from its prompt and seed alone.

    `fault(engine, handler)` may wait, close the connection (0) or answer with a status; None answers.
    """

    def __init__(self, fault: Fault = lambda engine, handler: None):
        self.asked: list[dict[str, Any]] = []
        self.fault, self.released = fault, threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                assert self.path == "/graftwork/samples"
                assert self.headers["authorization"] == "Bearer key"
                assert self.headers["x-graftwork-purpose"] == "rollout"
                fake.asked.append(body)
                status = fake.fault(fake, self)
                if status == 0:
                    self.connection.close()
                    return
                told = (
                    {"groups": [{"samples": group} for group in groups_of(body)]}
                    if status is None
                    else {"error": {"message": "no"}}
                )
                answer = json.dumps(told).encode()
                self.send_response(status or 200)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()

    @property
    def sizes(self) -> list[int]:
        return [len(body["prompts"]) for body in self.asked]


def groups_of(body: dict[str, Any]) -> list[list[dict[str, Any]]]:
    def sample(prompt: list[int], seed: int) -> dict[str, Any]:
        tokens = [(seed * 31 + 7 * prompt[0] + place) % 251 for place in range(body["max_tokens"])]
        return {
            "tokens": tokens,
            "logprobs": [-1.0] * len(tokens),
            "text": str(tokens),
            "stop_reason": "stop",
        }

    return [
        [sample(prompt, body["seed"] + number * body["n"] + member) for member in range(body["n"])]
        for number, prompt in enumerate(body["prompts"])
    ]


@pytest.fixture
def start() -> Iterator[Callable[..., Fake]]:
    """Start engines; all end with the test."""
    started: list[Fake] = []

    def start(*given: Any) -> Fake:
        started.append(Fake(*given))
        return started[-1]

    yield start
    for fake in started:
        fake.close()


def drawn(*engines: Fake, sampling: Sampling = SAMPLING, prompts: Any = PROMPTS) -> list[list[Sample]]:
    urls = [engine.url for engine in engines]
    return sample_over(lambda: urls, "key", "sums@1", prompts, sampling, look_s=0.05)


def once(status: int) -> Fault:
    """Fail the first request."""
    return lambda engine, handler: status if len(engine.asked) == 1 else None


def always(status: int) -> Fault:
    return lambda engine, handler: status


def hangs(engine: Fake, handler: Any) -> int | None:
    engine.released.wait(30)
    return 0


def test_a_step_is_cut_over_all_engines_with_the_tokens_of_one(start: Any) -> None:
    one = start()
    whole = sample_groups(one.url, "key", "sums@1", PROMPTS, SAMPLING)
    several = [start() for _ in range(3)]
    assert drawn(*several) == whole
    assert [engine.sizes for engine in several] == [[3], [2], [2]]
    assert [engine.asked[0]["seed"] for engine in several] == [11, 11 + 3 * 3, 11 + 5 * 3]
    # All that is asked for but prompts and seed is what one engine is asked for.
    for engine in several:
        assert {**engine.asked[0], "prompts": 0, "seed": 0} == {**one.asked[0], "prompts": 0, "seed": 0}
    # The tokens of a group depend on its seed, so a wrong one would show.
    assert drawn(*several, sampling=replace(SAMPLING, seed=12)) != whole


def test_more_engines_than_groups(start: Any) -> None:
    engines = [start() for _ in range(3)]
    one = start()
    assert drawn(*engines, prompts=PROMPTS[:2]) == drawn(one, prompts=PROMPTS[:2])
    assert sorted(map(sum, [engine.sizes for engine in engines])) == [0, 1, 1]


@pytest.mark.parametrize("status", [0, 429, 500, 503, 404, 400])
def test_a_failed_piece_goes_to_the_other_engines(start: Any, status: int) -> None:
    good, bad, other = start(), start(always(status)), start()
    assert drawn(good, bad, other) == drawn(start())
    assert bad.sizes == [2]
    # The failed piece of two groups is cut over both.
    assert sorted(good.sizes) == [1, 3]
    assert sorted(other.sizes) == [1, 2]


def test_an_engine_killed_in_the_middle(start: Any) -> None:
    """Its connection breaks while the others have answered, and then nothing listens at its address."""
    good, bad = start(), start(hangs)
    whole = background(lambda: drawn(good, bad))
    assert eventually(lambda: bad.asked and good.asked)
    bad.close()
    assert whole.result(60) == drawn(start())
    assert bad.sizes == [3]
    assert sorted(good.sizes) == [3, 4]


def test_an_engine_that_falls_silent_is_left(start: Any) -> None:
    """It keeps the connection and answers nothing: only its missing heartbeat says that it is gone."""
    good, silent = start(), start(hangs)
    live = [good.url, silent.url]
    whole = background(
        lambda: sample_over(lambda: list(live), "key", "sums@1", PROMPTS, SAMPLING, look_s=0.05)
    )
    assert eventually(lambda: silent.asked and good.asked)
    live.remove(silent.url)
    assert whole.result(60) == drawn(start())
    assert sorted(good.sizes) == [3, 4]


def test_a_late_answer_of_an_engine_that_was_left_is_taken_once(start: Any) -> None:
    slow = start(lambda engine, handler: engine.released.wait(30) and None)
    good = start(lambda engine, handler: (len(engine.asked) > 1 and time.sleep(0.5)) or None)
    live = [good.url, slow.url]
    whole = background(
        lambda: sample_over(lambda: list(live), "key", "sums@1", PROMPTS, SAMPLING, look_s=0.05)
    )
    assert eventually(lambda: slow.asked and good.asked)
    live.remove(slow.url)
    assert eventually(lambda: len(good.asked) == 2)
    slow.released.set()
    assert whole.result(60) == drawn(start())


def test_engines_that_are_full_are_asked_again_within_patience(start: Any) -> None:
    full = [start(once(429)), start(once(503))]
    assert drawn(*full) == drawn(start())
    engines = [start(always(429)) for _ in range(2)]
    began = time.monotonic()
    with pytest.raises(ServiceError, match="429"):
        drawn(*engines, sampling=replace(SAMPLING, patience_s=0.5))
    assert time.monotonic() - began >= 0.5
    # After 0.1, 0.2 and 0.4 s patience is over: the pieces are 2, 4, 7 and 7, and both are asked for each.
    assert max(len(engine.asked) for engine in engines) <= 2 + 4 + 7 + 7


def test_what_every_engine_refuses_is_raised_without_waiting(start: Any) -> None:
    engines = [start(always(400)), start(always(400))]
    with pytest.raises(ConfigError, match=r"400.*engine\.max_model_len"):
        drawn(*engines)
    assert all(len(engine.asked) <= 3 for engine in engines)
    with pytest.raises(NotFound, match="'sums@1'"):
        drawn(start(always(404)), start(always(404)))


def test_a_joining_engine_takes_a_failed_piece(start: Any) -> None:
    bad, late = start(always(503)), start()
    live = [bad.url, bad.url + "0"]
    whole = background(
        lambda: sample_over(lambda: list(live), "key", "sums@1", PROMPTS, SAMPLING, look_s=0.05)
    )
    assert eventually(lambda: bad.asked)
    live.append(late.url)
    assert whole.result(60) == drawn(start())


# Which engines


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    url = f"sqlite:///{tmp_path}/catalog.db"
    migrate(url)
    with Catalog(url) as catalog:
        yield catalog


def joined(catalog: Catalog, url: str, **changes: Any) -> Replica:
    row = Replica(url.rpartition("/")[2], url, "base", "1", url, 0, 0.0, draining=False)
    catalog.replicas.join(replace(row, **changes))
    return replace(row, **changes)


def test_one_engine_is_asked_at_its_own_address(catalog: Catalog) -> None:
    engines = Engines(catalog, "base", "http://mine")
    assert engines.urls() == ["http://mine"]
    joined(catalog, "http://mine-by-another-name")
    joined(catalog, "http://other-base", base="other")
    joined(catalog, "http://leaving", draining=True)
    assert engines.urls() == ["http://mine"]


def test_several_engines_are_those_that_live(catalog: Catalog) -> None:
    now = [0.0]
    engines = Engines(catalog, "base", "http://mine")
    engines.fleet = Fleet(catalog, lambda: now[0])
    mine, other = joined(catalog, "http://mine"), joined(catalog, "http://other")
    assert engines.urls() == ["http://mine", "http://other"]
    now[0] = 11
    assert catalog.replicas.beat(other, {})
    # Once there were several, a dead engine is not asked because it is this machine's.
    assert engines.urls() == ["http://other"]
    now[0] = 22
    assert engines.urls() == ["http://other"]
    catalog.replicas.join(replace(mine, incarnation="again"))
    assert engines.urls() == ["http://mine"]


def test_an_unreadable_catalog_leaves_the_last_engines(catalog: Catalog) -> None:
    engines = Engines(catalog, "base", "http://mine")
    joined(catalog, "http://mine")
    joined(catalog, "http://other")
    assert len(engines.urls()) == 2

    def unreadable() -> Any:
        raise ServiceError("The catalog cannot be read.")

    engines.fleet.live = unreadable  # type: ignore[method-assign]
    assert len(engines.urls()) == 2


def test_a_source_asks_one_engine_as_before_and_several_at_once(
    catalog: Catalog, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = start(), start()
    engines = Engines(catalog, "base", one.url)
    line: Any = Line("sums-1", None, 3, ("q_proj",))
    config: Any = None
    source = Source("sums", config, line, None, one.url, "key", "tiny", engines=engines)
    asked: list[Any] = []

    def counted(*given: Any) -> list[list[Sample]]:
        # A piece of several is not waited for, since another engine may take it.
        asked.extend([given] if given[-1].patience_s else [])
        return sample_groups(*given)

    monkeypatch.setattr(several_engines, "sample_groups", counted)
    alone = source.sample("sums@1", PROMPTS, SAMPLING)
    assert asked == [(one.url, "key", "sums@1", PROMPTS, SAMPLING)]
    joined(catalog, one.url)
    joined(catalog, two.url)
    assert source.sample("sums@1", PROMPTS, SAMPLING) == alone
    assert len(asked) == 1
    assert one.sizes[0] == 7
    assert sorted([*one.sizes[1:], *two.sizes]) == [3, 4]
    # The run's own engine is gone: the other one samples all.
    monkeypatch.setattr(engines, "urls", lambda: [two.url])
    assert source.sample("sums@1", PROMPTS, SAMPLING) == alone
    assert (len(asked), two.sizes[-1]) == (1, 7)


# Live engines


@pytest.mark.slow
@pytest.mark.services
@pytest.mark.timeout(900)
def test_two_live_engines_one_killed_give_the_tokens_of_one(tiny_base: Path, tmp_path: Path) -> None:
    from engine.base.families import BaseShapes
    from tests.helpers.parity import RANK, prompts, random_adapter

    one = start_engine(tiny_base, tmp_path / "state", name="one", threads=1)
    two = start_engine(tiny_base, tmp_path / "state", name="two", threads=1)
    try:
        model = one.publish("spread", random_adapter(BaseShapes.read(tiny_base).modules(), 1), RANK)
        asked, sampling = prompts(24), Sampling(group_size=8, max_tokens=48, seed=5)
        alone = sample_groups(one.url, one.key, model, asked, sampling)
        engines = Engines(one.catalog, one.base_digest, one.url)
        assert eventually(lambda: len(engines.urls()) == 2)
        assert sample_over(engines.urls, one.key, model, asked, sampling) == alone
        began = time.monotonic()
        sample_groups(two.url, two.key, model, asked[12:], sampling)
        half_s = time.monotonic() - began
        whole = background(lambda: sample_over(engines.urls, one.key, model, asked, sampling))
        time.sleep(half_s / 2)
        assert not whole.done()
        kill(two.process.pid)
        assert whole.result(300) == alone
        # Its row stays for a while, and nothing listens there.
        assert sample_over(engines.urls, one.key, model, asked, sampling) == alone
    finally:
        stop_engine(one)
        stop_engine(two)


def kill(pid: int) -> None:
    """End an engine's whole process tree at once, as a lost machine does, but for its reaper."""
    for process in psutil.Process(pid).children(recursive=True):
        os.kill(process.pid, signal.SIGKILL)


def test_a_free_port_refuses(start: Any) -> None:
    """An engine that is gone costs an attempt, not the step."""
    gone: Any = Fake()
    gone.close()
    gone.url = f"http://127.0.0.1:{free_port()}"
    good = start()
    assert drawn(good, gone) == drawn(start())
