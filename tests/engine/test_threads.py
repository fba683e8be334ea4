"""Work in the background outlives its errors, says each once, and shows when it last succeeded."""

import threading
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engine import threads
from engine.threads import WORKS, PeriodicThread, Work
from engine.work_metrics import WorkMetrics


class Odd(BaseException):
    """Stands for an interrupt, which is no error of the work."""


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Mock:
    log = Mock()
    monkeypatch.setattr(threads, "log", log)
    return log


def raising(error: BaseException) -> None:
    raise error


def test_each_new_error_is_said_once_and_all_are_counted(log: Mock) -> None:
    work = Work("sweeping")
    for error in (OSError("full"), OSError("full"), RuntimeError("odd"), RuntimeError("odd")):
        work.turn(lambda error=error: raising(error))
        assert work.error is error
    assert [call.args[2] for call in log.error.call_args_list] == ["OSError: full", "RuntimeError: odd"]
    assert work.errors == 4
    work.turn(lambda: None)
    assert (work.error, work.errors, log.warning.call_count) == (None, 4, 1)
    work.turn(lambda: raising(OSError("full")))
    assert log.error.call_count == 3
    with pytest.raises(Odd):
        work.turn(lambda: raising(Odd()))
    work.end()


def test_age_and_errors_are_metrics_until_the_work_ends(monkeypatch: pytest.MonkeyPatch, log: Mock) -> None:
    now = [100.0]
    monkeypatch.setattr(threads.time, "monotonic", lambda: now[0])
    registry = CollectorRegistry()
    WorkMetrics(registry)
    work = Work("sweeping")
    now[0] += 7
    work.turn(lambda: raising(OSError("full")))
    told = generate_latest(registry).decode()
    assert 'graftwork_background_age_seconds{work="sweeping"} 7.0' in told
    assert 'graftwork_background_errors_total{work="sweeping"} 1.0' in told
    work.turn(lambda: None)
    assert 'age_seconds{work="sweeping"} 0.0' in generate_latest(registry).decode()
    work.end()
    assert "sweeping" not in generate_latest(registry).decode()


def test_a_thread_goes_on_after_any_error(log: Mock) -> None:
    turns, third = [], threading.Event()

    def turn() -> None:
        turns.append(1)
        if len(turns) == 3:
            third.set()
        raise ValueError(len(turns))

    thread = PeriodicThread("sweeping", 0.001, turn)
    thread.start()
    assert third.wait(60)
    assert WORKS["sweeping"].errors >= 2
    thread.stop()
    thread.join(60)
    assert "sweeping" not in WORKS
