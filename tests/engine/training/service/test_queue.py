"""The trainer's queue: turns between sessions, limits, what a client may ask of an operation, cancelling."""

import itertools
import threading
from collections.abc import Iterator, Sequence

import pytest

from engine.errors import Busy, Cancelled, ConfigError, Conflict, NotFound, ServiceError
from engine.training.service.protocol import OptimStep, Request
from engine.training.service.queue import BRIEF_IN_A_ROW, KEPT, SKIPPED, Operation, Queue, joined

WAIT_S = 60


class Worker:
    """Work that notes its request's id; it begins only after `go`, and says when it has begun."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.go, self.begun = threading.Event(), threading.Event()

    def __call__(self, request: Request) -> str:
        self.begun.set()
        assert self.go.wait(WAIT_S)
        self.order.append(request.request_id)
        return request.request_id.upper()


def one_by_one(operations: Sequence[Operation]) -> None:
    for operation in operations:
        operation.perform()


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def queue(worker: Worker) -> Iterator[Queue]:
    queue = Queue(of_line=4, of_all=8, perform=one_by_one)
    yield queue
    worker.go.set()
    queue.close()


def send(queue: Queue, line: str, *numbers: int, work, **marks: bool) -> list[str]:
    return [queue.submit(Operation(Request(request_id=f"{line}{n}"), line, work, **marks)) for n in numbers]


def results(queue: Queue, ids: list[str]) -> list[str]:
    return [queue.operation(id).future.result(WAIT_S) for id in ids]


def test_a_session_that_floods_the_queue_waits_for_its_turns(queue, worker):
    ids = send(queue, "a", 0, work=worker)
    assert worker.begun.wait(WAIT_S)
    ids += send(queue, "a", 1, 2, 3, 4, work=worker)
    ids += send(queue, "b", 1, 2, work=worker) + send(queue, "c", 1, work=worker)
    worker.go.set()
    assert results(queue, ids) == [id.upper() for id in ids]
    # First in, first out within each session; and no session is served twice while another waits.
    assert worker.order == ["a0", "a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_what_is_brief_goes_before_what_is_long_of_others(queue, worker):
    send(queue, "a", 0, work=worker)
    assert worker.begun.wait(WAIT_S)
    ids = send(queue, "b", 1, work=worker) + send(queue, "c", 1, work=worker, brief=True)
    ids += send(queue, "a", 1, work=worker) + send(queue, "a", 2, work=worker, brief=True)
    foretold = [queue.place(id)["position"] for id in ids]
    worker.go.set()
    results(queue, ids)
    # Within its session a brief one stays behind the long one before it.
    assert worker.order == ["a0", "c1", "b1", "a1", "a2"]
    assert foretold == [2, 1, 3, 4]


def test_so_many_brief_ones_in_a_row_and_then_a_long_one(worker):
    queue = Queue(of_line=40, of_all=80, perform=one_by_one)
    try:
        send(queue, "a", 0, work=worker)
        assert worker.begun.wait(WAIT_S)
        ids = send(queue, "b", 1, work=worker)
        ids += send(queue, "c", *range(BRIEF_IN_A_ROW + 2), work=worker, brief=True)
        foretold = queue.place("b1")["position"]
        worker.go.set()
        results(queue, ids)
        assert worker.order.index("b1") == foretold == BRIEF_IN_A_ROW + 1
    finally:
        queue.close()


def test_a_step_that_is_under_way_is_waited_for_a_moment(queue, worker, monkeypatch):
    monkeypatch.setattr("engine.training.service.queue.LINGER_S", WAIT_S)
    send(queue, "a", 0, work=worker, leads=True)
    assert worker.begun.wait(WAIT_S)
    send(queue, "b", 1, work=worker)
    # The client of `a` sends what follows when it has its answer, not before.
    later = threading.Timer(0.01, send, (queue, "a", 1), {"work": worker, "brief": True})
    queue.operation("a0").future.add_done_callback(lambda _: later.start())
    worker.go.set()
    results(queue, ["b1"])
    assert worker.order == ["a0", "a1", "b1"]


def test_what_followed_nothing_is_not_waited_for_at_once_again(queue, worker, monkeypatch):
    waits: list[float] = []
    stock = threading.Condition.wait_for

    def wait_for(condition, predicate, timeout=None):
        """Note a wait for a successor, and let it end in vain at once."""
        if timeout is None:
            return stock(condition, predicate)
        waits.append(timeout)
        return stock(condition, predicate, 0)

    # The queue's thread skips a wait whose time is over before it begins, as a pause of 20 ms would have it.
    monkeypatch.setattr("engine.training.service.queue.LINGER_S", WAIT_S)

    monkeypatch.setattr(threading.Condition, "wait_for", wait_for)
    worker.go.set()

    def alternate(times: int) -> None:
        """Let another line wait whenever a leading operation of `a` ends."""
        for _ in range(times):
            number = next(numbers)
            queue.submit(Operation(Request(request_id=f"a{number}"), "a", leads_on, leads=True))
            results(queue, [f"a{number}", f"b{number}"])

    def leads_on(request: Request) -> None:
        send(queue, "b", int(request.request_id[1:]), work=worker)

    numbers = itertools.count()
    alternate(1)
    assert len(waits) == 1
    alternate(SKIPPED)
    assert len(waits) == 1
    alternate(1)
    assert len(waits) == 2


@pytest.mark.parametrize("choose", [lambda first: first[:1], joined])
def test_what_is_cancelled_while_a_step_is_waited_for_ends_nothing_else(worker, monkeypatch, choose):
    monkeypatch.setattr("engine.training.service.queue.LINGER_S", WAIT_S)
    queue = Queue(4, 8, one_by_one, choose)
    try:
        send(queue, "a", 0, work=worker, leads=True)
        assert worker.begun.wait(WAIT_S)
        send(queue, "b", 1, work=worker)
        queue.operation("a0").future.add_done_callback(lambda _: ended.set())
        ended = threading.Event()
        worker.go.set()
        assert ended.wait(WAIT_S)
        queue.cancel("b1")
        assert results(queue, send(queue, "a", 2, work=worker)) == ["A2"]
        assert worker.order == ["a0", "a2"]
    finally:
        queue.close()


def test_a_queue_that_is_full_says_so_with_its_state(queue, worker):
    send(queue, "a", 0, work=worker)
    assert worker.begun.wait(WAIT_S)
    send(queue, "a", 1, 2, 3, 4, work=worker)
    with pytest.raises(Busy, match=r"4 operations.*at most 4") as full:
        send(queue, "a", 5, work=worker)
    state = full.value.queue
    assert (state["queue_state"], state["queued"], state["queued_of_session"]) == ("paused_rate_limit", 4, 4)
    assert full.value.retry_after_s > 0
    # What waits already is no new operation, and others still have room until all of it is used.
    assert send(queue, "a", 4, work=worker) == ["a4"]
    send(queue, "b", 1, 2, 3, work=worker)
    send(queue, "c", 1, work=worker)
    with pytest.raises(Busy, match="8 in total"):
        send(queue, "d", 1, work=worker)
    worker.go.set()
    results(queue, ["a4", "b3", "c1"])
    assert results(queue, send(queue, "d", 1, work=worker)) == ["D1"]
    assert sorted(worker.order) == ["a0", "a1", "a2", "a3", "a4", "b1", "b2", "b3", "c1", "d1"]


def test_the_position_counts_what_is_served_before(queue, worker):
    send(queue, "a", 0, work=worker)
    assert worker.begun.wait(WAIT_S)
    for name in "abc":
        send(queue, name, 1, 2, work=worker)
    positions = {id: queue.place(id)["position"] for id in ("a0", "a1", "b1", "c1", "a2", "b2", "c2")}
    assert list(positions.values()) == [0, 1, 2, 3, 4, 5, 6]
    assert queue.place("c2")["queued"] == 6
    waits = [queue.place(id)["estimated_wait_s"] for id in ("a1", "b1", "c2")]
    assert waits == sorted(waits)
    worker.go.set()
    results(queue, ["c2"])
    # What was foretold is what happened.
    assert worker.order == list(positions)


def test_a_request_is_one_operation_and_a_failed_one_is_tried_again(queue, worker):
    worker.go.set()
    for _ in range(3):
        assert results(queue, send(queue, "a", 1, work=worker)) == ["A1"]
    assert worker.order == ["a1"]

    def fails(_: Request) -> None:
        raise ConfigError("Not so.")

    with pytest.raises(ConfigError):
        results(queue, send(queue, "a", 2, work=fails))
    assert results(queue, send(queue, "a", 2, work=worker)) == ["A2"]
    with pytest.raises(NotFound, match="'never'"):
        queue.operation("never")


def test_only_a_request_that_failed_may_come_again_as_another(queue, worker):
    def sent(speed: float, work) -> list[str]:
        request = OptimStep(request_id="a1", session="a", fence=1, adam_params={"learning_rate": speed})
        return [queue.submit(Operation(request, "a", work))]

    def fails(_: Request) -> None:
        raise ConfigError("Not so.")

    with pytest.raises(ConfigError):
        results(queue, sent(0.1, fails))
    ids = sent(0.2, worker)
    assert worker.begun.wait(WAIT_S)
    with pytest.raises(Conflict, match=r"'a1'.*different"):
        sent(0.3, worker)
    worker.go.set()
    assert results(queue, ids) == results(queue, sent(0.2, worker)) == ["A1"]
    with pytest.raises(Conflict, match=r"'a1'.*different"):
        sent(0.3, worker)
    assert worker.order == ["a1"]


def test_only_the_newest_results_of_a_session_are_kept(queue, worker):
    worker.go.set()
    for number in range(KEPT + 3):
        results(queue, send(queue, "a", number, work=worker))
    results(queue, send(queue, "b", 1, work=worker))
    with pytest.raises(NotFound):
        queue.operation("a2")
    assert queue.operation("a3").future.result() == "A3"
    # Not what was sent for it, which may be large.
    assert queue.operation("a3").request is None


def test_what_waits_is_cancelled_and_stays_so(queue, worker):
    send(queue, "a", 0, work=worker)
    assert worker.begun.wait(WAIT_S)
    send(queue, "a", 1, 2, work=worker)
    queue.cancel("a1")
    with pytest.raises(Cancelled, match=r"'a1'.*began"):
        results(queue, ["a1"])
    assert queue.state("a")["queued"] == 1
    with pytest.raises(Conflict, match=r"'a0'.*begun"):
        queue.cancel("a0")
    worker.go.set()
    assert results(queue, ["a0", "a2"]) == ["A0", "A2"]
    send(queue, "a", 1, work=worker)
    with pytest.raises(Cancelled):
        results(queue, ["a1"])
    queue.cancel("a0")
    assert results(queue, ["a0"]) == ["A0"]
    with pytest.raises(NotFound):
        queue.cancel("never")


def test_what_runs_and_can_stop_is_told_to(queue):
    begun = threading.Event()

    def stops(request: Request) -> None:
        begun.set()
        assert queue.operation(request.request_id).stop.wait(WAIT_S)
        raise Cancelled("Stopped.")

    queue.submit(Operation(Request(request_id="long"), "a", stops, can_stop=True))
    assert begun.wait(WAIT_S)
    queue.cancel("long")
    with pytest.raises(Cancelled, match="Stopped"):
        results(queue, ["long"])


def test_a_rule_takes_operations_of_several_sessions_together(worker):
    taken: list[list[str]] = []

    def perform(operations: list[Operation]) -> None:
        taken.append([operation.id for operation in operations])
        for operation in operations:
            operation.perform()

    queue = Queue(4, 8, perform, lambda first: first[:2])
    try:
        send(queue, "a", 0, work=worker)
        assert worker.begun.wait(WAIT_S)
        for name in "abc":
            send(queue, name, 1, 2, work=worker)
        worker.go.set()
        results(queue, ["a1", "a2", "b1", "b2", "c1", "c2"])
    finally:
        queue.close()
    assert taken == [["a0"], ["a1", "b1"], ["c1", "a2"], ["b2", "c2"]]


def test_a_queue_that_closes_leaves_nobody_waiting(worker):
    queue = Queue(4, 8, one_by_one)
    send(queue, "a", 0, work=worker)
    assert worker.begun.wait(WAIT_S)
    send(queue, "a", 1, work=worker)
    closing = threading.Thread(target=queue.close)
    closing.start()
    with pytest.raises(ServiceError, match="is stopping"):
        results(queue, ["a1"])
    worker.go.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert results(queue, ["a0"]) == ["A0"]
