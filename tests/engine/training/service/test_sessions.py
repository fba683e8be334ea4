"""Sessions of the trainer over HTTP, in this process: where they begin, who writes, what is refused."""

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from starlette.testclient import TestClient

from engine.base.families import BaseShapes
from engine.errors import (
    AdapterError,
    Busy,
    Cancelled,
    ConfigError,
    Conflict,
    NotFound,
    ServiceError,
)
from engine.planning import host
from engine.threads import background
from engine.training.model.lora import ResidentBase
from engine.training.service import client, sessions, state, trainer
from engine.training.service.app import make_app
from engine.training.service.protocol import AdamParams, Datum, Request, SessionInfo, TensorData
from engine.training.service.queue import KEPT
from tests.helpers.live import eventually
from tests.helpers.made_adapters import canonical, save
from tests.helpers.trainer_service import ADAM, data, step
from tests.helpers.trainers import NEW, Live, Trainers, bytes_of_new, gradients
from tests.helpers.training_sessions import factors, opening, same

OPEN = {"seed": 3, "policy_config": {"suite": "x"}, "holder": "a"}


@pytest.fixture(scope="module")
def base(tiny_base: Path) -> ResidentBase:
    return ResidentBase(tiny_base, threads=1, microbatch_tokens=64, longest=32)


@pytest.fixture
def trainers(base: ResidentBase, tmp_path: Path) -> Iterator[Trainers]:
    made = Trainers(base, tmp_path)
    yield made
    made.stop()


@pytest.fixture
def live(trainers: Trainers) -> Live:
    return trainers.start()


def silent(live: Live, info: SessionInfo) -> None:
    """Let a session's writer have been silent for longer than its lease."""
    live.known(info.session).heard -= sessions.LEASE_S


def tensors_of(live: Live, info: SessionInfo) -> dict[str, torch.Tensor]:
    return live.session(info).adapter.canonical(torch.float32)


# Where a session begins


def test_a_session_begins_at_any_revision(live):
    first = live.client.create_session("first", "sums", **NEW)
    step(live.client, first, 1)
    revision = live.client.export(first, "revision", probe_prompts=[[5, 6]], probe_tokens=2)
    live.client.close_session(first)
    want = tensors_of(live, live.client.create_session("first", "sums", **NEW))
    starts = {
        "parent": {"policy": "sums", "parent": revision.digest},
        "parent-policy": {"policy": "other", "parent": revision.digest, "parent_policy": "sums"},
        "fork": {"policy": "third", "fork": "sums"},
    }
    for name, start in starts.items():
        begun = live.client.create_session(name, **start, **OPEN)
        assert (begun.step, begun.parent, begun.history) == (0, revision.digest, ())
        assert same(tensors_of(live, begun), want)
        # What was left open is the revision's own.
        assert live.session(begun).settings["rank"] == 4
        assert live.session(begun).settings["targets"] == sorted(NEW["targets"])
    with pytest.raises(NotFound, match="exported revision"):
        live.client.create_session("none", "fourth", fork="third", **OPEN)
    with pytest.raises(NotFound, match="no policy 'nobody'"):
        live.client.create_session("none", "fourth", fork="nobody", **OPEN)


def test_a_fork_of_a_policy_begins_at_its_champion(live):
    first = live.client.create_session("first", "sums", **NEW)
    digests = []
    for number in (1, 2):
        step(live.client, first, number)
        digests.append(live.client.export(first, "revision", probe_prompts=[[5, 6]], probe_tokens=2).digest)
    assert live.client.create_session("newest", "b", fork="sums", **OPEN).parent == digests[1]
    catalog = live.trainer.exporter.catalog
    route = catalog.routes.get("sums")
    catalog.routes.update(replace(route, champion=digests[0]), route.version)
    assert live.client.create_session("champion", "c", fork="sums", **OPEN).parent == digests[0]


def test_a_larger_rank_begins_with_the_same_function(live):
    first = live.client.create_session("first", "sums", **NEW)
    step(live.client, first, 1)
    digest = live.client.export(first).digest
    wide = live.client.create_session("wide", "wide", parent=digest, parent_policy="sums", rank=6, **OPEN)
    scores = [live.client.forward(session, data(4)) for session in (first, wide)]
    torch.testing.assert_close(torch.tensor(scores[1]), torch.tensor(scores[0]), atol=1e-5, rtol=0)
    assert live.session(wide).settings["rank"] == 6
    base = torch.tensor(live.client.forward(live.client.create_session("base", "base", **NEW), data(4)))
    assert (base - torch.tensor(scores[0])).abs().max() > 1e-2


def test_a_session_begins_at_an_adapter_from_elsewhere(live, tiny_base, tmp_path):
    """Ranks differ from module to module; the adapter's alpha is twice its rank."""
    shapes = BaseShapes.read(tiny_base)
    ranks = {module: 1 + number % 3 for number, module in enumerate(shapes.linear)}
    tensors = canonical(shapes, ranks=ranks)
    pattern = {"rank_pattern": ranks, "alpha_pattern": {name: 2 * rank for name, rank in ranks.items()}}
    directory = save(
        tmp_path / "elsewhere",
        {f"base_model.model.{key}.weight": tensor for key, tensor in tensors.items()},
        {"r": 1, "lora_alpha": 2, "target_modules": "all-linear", **pattern},
    )
    begun = live.client.create_session("elsewhere", "theirs", adapter=str(directory), **OPEN)
    found = tensors_of(live, begun)
    for module in shapes.linear:
        product = found[f"{module}.lora_B"] @ found[f"{module}.lora_A"]
        want = 2 * tensors[f"{module}.lora_B"] @ tensors[f"{module}.lora_A"]
        torch.testing.assert_close(product, want, atol=1e-5, rtol=1e-5)
    step(live.client, begun, 1)
    with pytest.raises(AdapterError, match=r"adapter.*rank 3"):
        live.client.create_session("small", "theirs", adapter=str(directory), rank=2, **OPEN)
    with pytest.raises(AdapterError, match="`targets`"):
        live.client.create_session("few", "theirs", adapter=str(directory), targets=["q_proj"], **OPEN)
    with pytest.raises(AdapterError, match="not a directory"):
        live.client.create_session("none", "theirs", adapter=str(tmp_path / "none"), **OPEN)


def test_a_fork_of_a_session_goes_on_as_the_session_does(live):
    """Adam moments included: the next step of both is the same, and each is its own after that."""
    first = live.client.create_session("first", "sums", **NEW)
    for number in range(3):
        step(live.client, first, number)
    fork = live.client.create_session("fork", "other", fork_session="first", **OPEN)
    assert (fork.step, fork.history) == (0, ())
    for session in (first, fork):
        step(live.client, session, 7)
    assert same(factors(live.session(first)), factors(live.session(fork)))
    step(live.client, fork, 8)
    assert not same(factors(live.session(first)), factors(live.session(fork)))
    with pytest.raises(ConfigError, match="rank, 4"):
        live.client.create_session("fork-2", "other", fork_session="first", rank=8, **OPEN)
    with pytest.raises(NotFound, match="session 'nobody'"):
        live.client.create_session("fork-2", "other", fork_session="nobody", **OPEN)
    with pytest.raises(ConfigError, match="fork and fork_session"):
        live.client.create_session("fork-2", "other", fork_session="first", fork="sums", **OPEN)


def test_a_fork_begins_at_a_named_state_with_or_without_its_moments(live):
    client = live.client
    first = client.create_session("first", "sums", **NEW)
    for number in range(2):
        step(client, first, number)
    client.save_state(first, "best")
    best = factors(live.session(first))
    step(client, first, 7)
    seventh = factors(live.session(first))
    step(client, first, 8)

    at_best = {"fork_session": "first", "fork_state": "best", **OPEN}
    fork = client.create_session("fork", "other", **at_best)
    bare = client.create_session("bare", "other", fork_moments=False, **at_best)
    loaded = client.create_session("loaded", "other", **NEW)
    step(client, loaded, 3)
    client.forward_backward(loaded, data(1))
    assert client.load_state(loaded, "best", source="first").step == 1
    for session in (fork, bare, loaded):
        assert same(factors(live.session(session)), best)
        step(client, session, 7)
    assert same(factors(live.session(fork)), seventh)
    assert same(factors(live.session(loaded)), seventh)
    assert not same(factors(live.session(bare)), seventh)
    client.load_state(loaded, "best", source="first", moments=False)
    step(client, loaded, 7)
    assert same(factors(live.session(loaded)), factors(live.session(bare)))
    client.load_state(first, "best", moments=False)
    step(client, first, 7)
    assert same(factors(live.session(first)), factors(live.session(bare)))

    with pytest.raises(NotFound, match=r"'first'.*'none'"):
        client.create_session("fork-2", "other", **{**at_best, "fork_state": "none"})
    with pytest.raises(ConfigError, match="Give `fork_session` too"):
        client.create_session("fork-2", "other", fork_state="best", **NEW)
    with pytest.raises(NotFound, match=r"'nobody'.*'best'"):
        client.load_state(loaded, "best", source="nobody")
    wide = client.create_session("wide", "other", **{**NEW, "rank": 8})
    with pytest.raises(Conflict, match=r"'first'.*rank 4"):
        client.load_state(wide, "best", source="first")


def test_sums_are_asked_for_by_name(live):
    """The answer has every target; chunks add up; only gradients tell both calls apart."""
    client = live.client
    session = client.create_session("one", "sums", **NEW)
    sent = [summed(datum) for datum in data(1)]
    told = client.forward_only(session, sent)
    assert live.session(session).calls == 0
    found = client.forward_backward(session, sent, "cross_entropy", reduction="sum")
    assert told["loss_fn_outputs"] == found["loss_fn_outputs"]
    rows = [one["logprobs"]["data"] for one in told["loss_fn_outputs"]]
    assert [len(row) for row in rows] == [7] * 4
    assert told["metrics"]["loss"] == pytest.approx(found["metrics"]["loss"], rel=1e-5)
    assert told["metrics"]["loss"] == pytest.approx(sum(p for row in rows for p in row), rel=1e-5)
    whole = gradients(live.session(session))
    client.optim_step(session, AdamParams(learning_rate=0, eps=1e-12, grad_clip_norm=0))
    for datum in sent:
        client.forward_backward(session, [datum], "cross_entropy", reduction="sum")
    for key, gradient in gradients(live.session(session)).items():
        torch.testing.assert_close(gradient, whole[key], atol=1e-5, rtol=1e-3)
    with pytest.raises(ConfigError, match=r"Datum 0.*weights nan"):
        client.forward_backward(session, [summed(sent[0], float("nan"))], "cross_entropy", reduction="sum")
    with pytest.raises(ConfigError, match=r"dapo.*sum"):
        client.forward_only(session, sent, "dapo")


def summed(datum: Datum, weight: float = -1.0) -> Datum:
    """The datum with a weight for every target."""
    targets = datum.loss_fn_inputs["target_tokens"]
    weights = TensorData(data=[weight] * len(targets.data), shape=[len(targets.data)])
    return datum.model_copy(update={"loss_fn_inputs": {"target_tokens": targets, "weights": weights}})


def test_a_snapshot_expires_when_its_export_says(live):
    session = live.client.create_session("one", "sums", **NEW, snapshot_ttl_s=60)
    ends = []
    for number, ttl_s in enumerate((None, 86_400.0)):
        step(live.client, session, number)
        digest = live.client.export(session, ttl_s=ttl_s).digest
        ends.append(live.trainer.exporter.catalog.revisions.get("sums", digest).expires_at - time.time())
    assert ends == pytest.approx([60, 86_400], abs=30)
    with pytest.raises(ConfigError, match=r"expire.*`ttl_s`"):
        live.client.export(session, "revision", probe_prompts=[[5]], ttl_s=60.0)


# Who writes


def test_one_writer_a_policy(live):
    first = live.client.create_session("one", "sums", **NEW)
    with pytest.raises(Conflict, match=r"by 'a'.*'one'"):
        live.client.create_session("two", "sums", **{**NEW, "holder": "b"})
    # The holder itself may have several, and another policy is free.
    third = live.client.create_session("three", "sums", **NEW)
    live.client.create_session("four", "others", **{**NEW, "holder": "b"})
    live.client.close_session(first)
    live.client.close_session(third)
    assert live.resident() == {"four"}
    live.client.create_session("two", "sums", **{**NEW, "holder": "b"})
    # What was closed comes back for its writer, but not beside another.
    with pytest.raises(Conflict, match=r"by 'b'.*'two'"):
        step(live.client, first, 1)


def test_what_was_closed_is_free_after_a_restart_too(trainers):
    live = trainers.start()
    open_one = live.client.create_session("open", "others", **NEW)
    closed = live.client.create_session("closed", "sums", **NEW)
    live.client.close_session(closed)
    again = trainers.start()
    assert again.client.create_session("new", "sums", **{**NEW, "holder": "b"}).step == 0
    with pytest.raises(Conflict, match=r"by 'b'.*'new'"):
        step(again.client, closed, 1)
    with pytest.raises(Conflict, match=r"by 'a'.*'open'"):
        again.client.create_session("other", "others", **{**NEW, "holder": "b"})
    assert step(again.client, open_one, 1)["step"] == 1


def test_a_client_that_disappears_loses_its_lease_and_nothing_else(live):
    gone = live.client.create_session("gone", "sums", **NEW)
    step(live.client, gone, 1)
    silent(live, gone)
    new = live.client.create_session("new", "sums", **{**NEW, "holder": "b"})
    with pytest.raises(Conflict, match=r"by 'b'.*'new'"):
        step(live.client, gone, 2)
    silent(live, new)
    taken = live.client.create_session("gone", "sums", **{**NEW, "holder": "c"})
    assert taken.step == 1
    with pytest.raises(Conflict, match="another writer"):
        step(live.client, gone, 2)


def test_a_look_at_a_stored_session_never_puts_an_older_writer_back(trainers, monkeypatch):
    """The session is opened again while another thread has read its file and not yet noted it."""
    first = trainers.start()
    old = first.client.create_session("one", "sums", **NEW)
    # A trainer that starts knows only the sessions whose writers are active.
    first.client.close_session(old)
    live, read_header, newer = trainers.start(), state.read_header, []

    def is_overtaken(file):
        found = read_header(file)
        monkeypatch.setattr(state, "read_header", read_header)
        newer.append(live.trainer.create_session(opening("one", request_id="newer", **NEW)))
        return found

    monkeypatch.setattr(state, "read_header", is_overtaken)
    assert not live.trainer.sessions.hear("one", old.fence)
    assert live.known("one").fence == newer[0]["fence"] > old.fence
    assert live.known("one").session
    assert len(newer) == 1


def test_a_writer_is_heard_while_it_asks_for_its_result(live):
    session = live.client.create_session("one", "sums", **NEW)
    release, known = threading.Event(), live.known("one")
    request = live.trainer.submit(Request(request_id="long"), lambda _: release.wait(20))
    live.client.http.post("/forward", json=_forward(session, "waits"))
    known.heard -= sessions.LEASE_S / 2
    before = known.heard
    assert live.client.http.get("/operations/waits").json()["state"] == "pending"
    assert known.heard >= before + sessions.LEASE_S / 2
    release.set()
    assert live.trainer.operation(request).result(20)


def test_a_writer_keeps_its_lease_by_a_heartbeat(live, monkeypatch):
    monkeypatch.setattr(client, "HEARTBEAT_S", 0.02)
    first = live.client.create_session("one", "sums", **NEW)
    known = live.known("one")
    # Not read again after it was set: a heartbeat may come in between.
    before = known.heard - (sessions.LEASE_S - 1)
    known.heard = before
    assert eventually(lambda: live.known("one").heard != before)
    assert live.known("one").heard > before + 20
    # The close waits so long for a beat that is under way, which would renew the lease once more.
    monkeypatch.setattr(client, "HEARTBEAT_S", 60)
    live.client.close()
    beat = {"session": "one", "fence": first.fence}
    with TestClient(make_app(live.trainer)) as http:
        silent(live, first)
        assert http.post("/session_heartbeat", json=beat).json() == {"writes": True}
        assert live.known("one").is_active
        assert http.post("/session_heartbeat", json={**beat, "fence": 1}).json() == {"writes": False}
        # Nobody has a lease back that another holder has taken.
        silent(live, first)
        live.known("one").opened = live.known("one").opened.model_copy(update={"holder": "gone"})
        live.trainer.create_session(opening("two", holder="b"))
        assert http.post("/session_heartbeat", json=beat).json() == {"writes": False}
    assert not live.known("one").is_active


def _forward(session: SessionInfo, id: str) -> dict:
    given = {"data": [datum.model_dump() for datum in data(1)]}
    return {"request_id": id, "session": session.session, "fence": session.fence, "forward_input": given}


# What leaves memory, and what comes back


def digests_alone(trainers: Trainers, names: tuple[str, ...]) -> list[str]:
    live = trainers.start()
    found = []
    for seed, name in enumerate(names):
        session = live.client.create_session(f"{name}-alone", name, **{**NEW, "seed": seed})
        for number in range(3):
            step(live.client, session, 10 * seed + number)
        found.append(live.client.export(session).digest)
    return found


@pytest.mark.long
def test_sessions_that_take_turns_in_little_memory_are_as_alone(trainers):
    names = ("a", "b", "c")
    want = digests_alone(trainers, names)
    live = trainers.start(held=2)
    opened = [
        live.client.create_session(name, name, **{**NEW, "seed": seed}) for seed, name in enumerate(names)
    ]
    for number in range(3):
        for seed, session in enumerate(opened):
            step(live.client, session, 10 * seed + number)
            assert len(live.resident()) == 2
            assert session.session in live.resident()
    assert [live.client.export(session).digest for session in opened] == want
    assert len(set(want)) == 3
    rows = {row["session"]: row for row in live.client.sessions()}
    assert {name: rows[name]["step"] for name in names} == {"a": 3, "b": 3, "c": 3}
    health = live.client.health()
    assert health["session_bytes"] == 2 * bytes_of_new(live.trainer.base) <= health["session_bytes_limit"]


def test_what_is_in_the_middle_of_a_step_stays_until_its_lease_ends(trainers):
    live = trainers.start(held=1)
    first = live.client.create_session("first", "a", **NEW)
    second = live.client.create_session("second", "b", **NEW)
    live.client.forward_backward(first, data(1))
    with pytest.raises(Busy, match=r"bytes.*sessions") as full:
        live.client.forward_backward(second, data(1))
    assert (full.value.queue, full.value.retry_after_s) == ({"queue_state": "paused_capacity"}, 1.0)
    assert live.client.optim_step(first, ADAM)["step"] == 1
    live.client.forward_backward(second, data(1))
    silent(live, second)
    # Its gradients are lost, so the step must be repeated; it cannot be applied without them.
    step(live.client, first, 2)
    with pytest.raises(ServiceError, match=r"0 calls.*step 0"):
        live.client.optim_step(second, ADAM)
    assert live.client.sessions()[0]["session"] == "second"
    second = live.client.create_session("second", "b", **NEW)
    assert step(live.client, second, 1)["step"] == 1


def test_a_rank_over_the_capacity_is_refused_with_the_numbers(trainers):
    live = trainers.start(held=1)
    needed = bytes_of_new(live.trainer.base)
    with pytest.raises(ConfigError, match=f"{2 * needed:,}.*{needed:,}"):
        live.client.create_session("large", "a", **{**NEW, "rank": 8})
    assert live.client.sessions() == []


def test_a_container_limits_what_is_free(tmp_path, monkeypatch):
    free = host.free_bytes()
    assert 0 < free < 1 << 50
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("5000\n")
    assert host.free_bytes() == 4000
    (tmp_path / "memory.max").write_text("max\n")
    assert host.free_bytes() > 1 << 20


def test_after_a_restart_sessions_come_back_and_fences_hold(trainers):
    live = trainers.start()
    session = live.client.create_session("one", "sums", **NEW)
    old = live.client.create_session("two", "sums", **NEW)
    newer = live.client.create_session("two", "sums", **NEW)
    step(live.client, session, 1)
    want = factors(live.session(session))
    again = trainers.start()
    assert {row["session"]: (row["step"], row["resident"]) for row in again.client.sessions()} == {
        "one": (1, False),
        "two": (0, False),
    }
    with pytest.raises(Conflict, match="written by 'a'"):
        again.client.create_session("three", "sums", **{**NEW, "holder": "b"})
    assert step(again.client, session, 2)["step"] == 2
    with pytest.raises(Conflict, match="another writer"):
        step(again.client, old, 1)
    assert step(again.client, newer, 1)["step"] == 1
    assert not same(want, factors(again.session(session)))
    with pytest.raises(NotFound, match="no session 'never'"):
        step(again.client, replace(session, session="never"), 1)


def test_what_was_stored_is_answered_again_after_a_restart(trainers):
    live = trainers.start()
    send = live.client.http.post
    opened = live.client.create_session("one", "sums", request_id="open", **NEW)
    step(live.client, opened, 1)
    who = {"session": "one", "fence": opened.fence}
    requests = {
        "/save_state": {**who, "request_id": "save", "name": "best"},
        "/load_state": {**who, "request_id": "load", "name": "best"},
    }
    for path, body in requests.items():
        send(path, json=body)
    first = {id: result_of(live, id) for id in ("open", "save", "load")}
    step(live.client, opened, 2)

    again = trainers.start()
    # Polled by who never sends it again, and sent again.
    assert {id: result_of(again, id) for id in first} == first
    for path, body in requests.items():
        again.client.http.post(path, json=body)
    assert {id: result_of(again, id) for id in first} == first
    repeated = again.client.create_session("one", "sums", request_id="open", **NEW)
    assert repeated == opened
    assert step(again.client, opened, 3)["step"] == 3
    saved = Path(first["save"]["path"])
    assert saved.name == "best.state"
    assert again.client.load_state(opened, "best").step == 1
    for _ in range(2):
        again.client.delete_state("one", "best")
    assert not saved.exists()
    assert saved.with_name("current.state").exists()
    with pytest.raises(ConfigError, match="last step"):
        again.client.delete_state("one", "current")


@pytest.mark.long
def test_a_step_that_is_asked_for_late_was_taken_once(trainers):
    """Its result has left the queue, and so many others came that none of its session is kept there."""
    live = trainers.start()
    session = live.client.create_session("one", "sums", **NEW)
    live.client.forward_backward(session, data(1))
    first = live.client.optim_step(session, ADAM, request_id="first")
    for _ in range(70):
        live.client.optim_step(session, ADAM, skip=True)
    want = factors(live.session(session))
    for started in (lambda: live, trainers.start):
        now = started()
        with pytest.raises(NotFound):
            now.trainer.queue.operation("first")
        assert result_of(now, "first") == first
        # With gradients there that a second time would take.
        again = now.client.create_session("one", "sums", **NEW)
        now.client.forward_backward(again, data(2))
        assert now.client.optim_step(again, ADAM, request_id="first") == first
        assert now.session(session).step == 71
        assert same(factors(now.session(session)), want)


def test_gradients_that_are_sent_again_late_do_not_count_twice(live):
    session = live.client.create_session("one", "sums", **NEW)
    live.client.forward_backward(session, data(1), request_id="first")
    for _ in range(KEPT):
        live.client.forward(session, data(1))
    before = gradients(live.session(session))
    given = {"data": [datum.model_dump() for datum in data(1)]}
    who = {"request_id": "first", "session": "one", "fence": session.fence, "gathered": 0}
    live.client.http.post("/forward_backward", json={**who, "forward_backward_input": given})
    late = live.client.http.get("/operations/first", params={"wait_s": 20}).json()
    assert (late["state"], late["kind"]) == ("failed", "ServiceError")
    assert "of 1 calls" in late["error"]
    assert same(gradients(live.session(session)), before)


def test_a_request_that_comes_again_with_another_body_is_refused(live):
    session = live.client.create_session("one", "sums", **NEW)
    first = live.client.forward_backward(session, data(1), request_id="first")
    with pytest.raises(Conflict, match=r"'first'.*different"):
        live.client.forward_backward(session, data(2), request_id="first")
    # Whose writer sends it, and after how many calls, is no other request.
    again = live.client.create_session("one", "sums", **NEW)
    assert live.client.forward_backward(again, data(1), request_id="first") == first
    body = {"request_id": "named", "session": "one", "fence": again.fence, "name": "best"}
    answers = [live.client.http.post(path, json=body) for path in ("/save_state", "/load_state")]
    assert [answer.status_code for answer in answers] == [200, 409]


def result_of(live: Live, id: str) -> dict:
    answer = live.client.http.get(f"/operations/{id}", params={"wait_s": 20}).json()
    assert answer["state"] == "done", answer
    return answer["result"]


def test_others_poll_while_a_lost_operation_is_looked_for(live, monkeypatch):
    session = live.client.create_session("one", "sums", **NEW)
    live.client.http.post("/forward", json=_forward(session, "known"))
    looking, polled = threading.Event(), threading.Event()
    headers = live.trainer.sessions.headers

    def looks_long():
        looking.set()
        assert polled.wait(20), "the poll had to wait for the look"
        return headers()

    monkeypatch.setattr(live.trainer.sessions, "headers", looks_long)
    with TestClient(make_app(live.trainer)) as http, ThreadPoolExecutor(1) as pool:
        lost = pool.submit(http.get, "/operations/lost")
        assert looking.wait(20)
        assert http.get("/operations/known", params={"wait_s": 20}).json()["state"] == "done"
        polled.set()
        assert lost.result(20).status_code == 404


def test_gradients_of_a_call_before_a_restart_are_missed(trainers):
    live = trainers.start()
    session = live.client.create_session("one", "sums", **NEW)
    live.client.forward_backward(session, data(1))
    again = trainers.start()
    # The client outlives the trainer.
    live.client.http = again.client.http
    with pytest.raises(ServiceError, match=r"0 calls.*step 0"):
        live.client.forward_backward(session, data(2))


def test_a_damaged_state_is_a_sentence_and_leaves_others_alone(trainers):
    live = trainers.start()
    session = live.client.create_session("one", "sums", **NEW)
    live.client.create_session("two", "sums", **NEW)
    file = trainers.state / "sessions" / "two" / "current.state"
    file.write_bytes(file.read_bytes()[:1000])
    again = trainers.start()
    assert [row["session"] for row in again.client.sessions()] == ["one"]
    assert step(again.client, session, 1)["step"] == 1
    with pytest.raises(ServiceError, match=r"two/current\.state is damaged"):
        again.client.create_session("two", "sums", **NEW)


# What is refused


def changed(tokens: list[int]) -> Datum:
    body = data(1)[0].model_dump()
    body["model_input"]["chunks"][0]["tokens"] = tokens
    return Datum.model_validate(body)


def long(tokens: int) -> Datum:
    body = data(1)[0].model_dump()
    body["model_input"]["chunks"][0]["tokens"] = [5] * tokens
    for tensor in body["loss_fn_inputs"].values():
        tensor["data"] = [tensor["data"][0]] * (tokens - 4) + tensor["data"][-4:]
    return Datum.model_validate(body)


def ended(target: float) -> Datum:
    body = data(1)[0].model_dump()
    body["loss_fn_inputs"]["target_tokens"]["data"][-1] = target
    return Datum.model_validate(body)


@pytest.mark.parametrize(
    ("given", "loss", "sentence"),
    [
        (list, "dapo", "no samples"),
        (lambda: [*data(1), changed([5, 10**6, *[5] * 5])], "dapo", "Sample 4.*1000000"),
        (lambda: [changed([5, -1, *[5] * 5])], "dapo", "token -1"),
        (lambda: [long(32)], "dapo", "Sample 0.*33 tokens"),
        (lambda: [changed([5, 6])], "dapo", "2 values"),
        (lambda: [ended(5.7)], "dapo", r"target_tokens.*5\.7"),
        (lambda: data(1), "hope", "no loss 'hope'"),
    ],
    ids=["empty", "vocabulary", "negative", "long", "lengths", "fraction", "loss"],
)  # fmt: skip
def test_bad_data_is_a_sentence_and_changes_nothing(live, given, loss, sentence):
    session = live.client.create_session("one", "sums", **NEW)
    live.client.forward_backward(session, data(1))
    before = gradients(live.session(session))
    with pytest.raises(ConfigError, match=sentence):
        live.client.forward_backward(session, given(), loss)
    assert same(gradients(live.session(session)), before)
    live.client.forward_backward(session, [long(31)])
    assert live.client.optim_step(session, ADAM)["step"] == 1


def test_with_router_replay_what_is_wrong_keeps_its_number_and_pairs_stay_pairs(live):
    session = live.client.create_session("one", "sums", **NEW)
    wrong = [*data(1), changed([5, 10**6, *[5] * 5])]
    with pytest.raises(ConfigError, match=r"Sample 4.*1000000"):
        live.client.forward_backward(session, wrong, router_replay=True)
    with pytest.raises(ConfigError, match=r"dpo.*groups of 2"):
        live.client.forward_backward(session, data(1)[:3], "dpo", router_replay=True)
    with pytest.raises(ConfigError, match=r"engine\.routed_experts.*router_replay"):
        live.client.forward_backward(session, data(1), "dpo", router_replay=True)


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"targets": ["z_proj"]}, ConfigError, "no projections z_proj"),
        ({"rank": 0}, ConfigError, "`rank`.*greater"),
        ({"rank": None}, ConfigError, "`rank`.*`targets`"),
        ({"policy_config": None}, NotFound, "no policy 'sums'"),
        ({"parent": "0" * 64}, NotFound, "no revision '000000000000'"),
        ({"layers": 3}, ConfigError, "Unknown key `layers`"),
        ({"ranks": {"z_proj": 3}}, ConfigError, "'z_proj'"),
    ],
)
def test_a_session_that_cannot_begin_leaves_nothing(live, changes, error, sentence):
    with pytest.raises(error, match=sentence):
        live.client.create_session("one", "sums", **{**NEW, **changes})
    assert live.client.sessions() == []


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rank": 2}, "'one'.*rank 4, not 2"),
        ({"alpha": 4.0}, "alpha 8.0, not 4.0"),
        ({"targets": ["q_proj"]}, r"targets \['down_proj', 'q_proj'\], not \['q_proj'\]"),
        ({"ranks": {"q_proj": 2}}, "ranks {}, not {'q_proj': 2}"),
        ({"alphas": {"q_proj": 2.0}}, "alphas {}, not {'q_proj': 2.0}"),
        ({"seed": 4}, "seed 3, not 4"),
        ({"policy": "sorting"}, "policy 'sums', not 'sorting'"),
        ({"parent": "0" * 64}, "parent None, not '0000"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_session_goes_on_as_it_is_or_not_at_all(live, changes, sentence, resident):
    session = live.client.create_session("one", "sums", **NEW)
    step(live.client, session, 1)
    before = factors(live.session(session))
    if not resident:
        live.client.close_session(session)
    with pytest.raises(Conflict, match=sentence):
        live.client.create_session(**{"session": "one", "policy": "sums", **NEW, **changes})
    # In another order they are the same targets.
    again = live.client.create_session("one", "sums", **{**NEW, "targets": NEW["targets"][::-1]})
    assert again.step == 1
    assert same(factors(live.session(again)), before)


def test_a_body_that_is_not_valid_is_a_sentence(live):
    answer = live.client.http.post("/optim_step", json={"request_id": "x", "session": "one", "speed": 3})
    assert answer.status_code == 400
    assert answer.json()["kind"] == "ConfigError"
    assert "`fence`: Field required" in answer.json()["error"]
    assert "`speed`" in answer.json()["error"]


@pytest.mark.parametrize("name", ["../elsewhere", "one/../../elsewhere", "/elsewhere", "One", "", "one\n"])
def test_a_name_that_is_no_sessions_reaches_no_file(live, name):
    """A session's files lie outside of all sessions, under a path that such a name leads to."""
    session = live.client.create_session("one", "sums", **NEW)
    folder = live.trainer.sessions.directory
    shutil.copytree(folder / "one", folder.parent / "elsewhere")
    who = {"session": name, "fence": session.fence}
    given = {"data": [datum.model_dump() for datum in data(1)]}
    bodies = {
        "/session_heartbeat": who,
        "/close_session": who,
        "/forward": {**who, "forward_input": given},
        "/forward_backward": {**who, "forward_backward_input": given},
        "/optim_step": who,
        "/save_state": {**who, "name": "best"},
        "/load_state": {**who, "name": "best"},
        "/export": who,
        "/sessions": {"session": name, "policy": "sums", **NEW},
        "/sessions?fork": {
            "session": "two",
            "policy": "other",
            "fork_session": name,
            "seed": 3,
            "holder": "a",
        },
    }
    for path, body in bodies.items():
        sent = body if path == "/session_heartbeat" else {**body, "request_id": "x"}
        answer = live.client.http.post(path, json=sent)
        assert answer.status_code == 400, (path, answer.text)
        assert answer.json()["kind"] == "ConfigError", path
        assert "match pattern" in answer.json()["error"]
    assert [row["session"] for row in live.client.sessions()] == ["one"]
    for path in ("/save_state", "/load_state"):
        body = {"session": "one", "fence": session.fence, "request_id": "x", "name": name}
        assert live.client.http.post(path, json=body).status_code == 400


# Cancelling and back-pressure


def test_a_cancelled_forward_backward_stops_and_leaves_the_gradients(live, monkeypatch):
    session = live.client.create_session("one", "sums", **NEW)
    live.client.forward_backward(session, data(1))
    before = gradients(live.session(session))
    many = [datum for seed in range(50) for datum in data(seed)]
    whole, seen = live.trainer.base.logprobs_and_entropy, []

    def cancels(rows):
        seen.append(rows)
        if len(seen) == 3:
            live.trainer.queue.cancel("long")
        return whole(rows)

    with monkeypatch.context() as patch:
        patch.setattr(live.trainer.base, "logprobs_and_entropy", cancels)
        with pytest.raises(Cancelled, match="while it ran"):
            live.client.forward_backward(session, many, request_id="long")
    assert len(seen) == 3
    assert same(gradients(live.session(session)), before)
    answer = live.client.http.get("/operations/long").json()
    assert (answer["state"], answer["kind"]) == ("cancelled", "Cancelled")
    assert live.client.optim_step(session, ADAM)["step"] == 1


@pytest.mark.parametrize("kind", ["forward", "export", "probe"])
def test_what_only_looks_is_cancelled_between_microbatches_and_tokens(live, monkeypatch, kind):
    session = live.client.create_session("one", "sums", **NEW)
    digest = live.client.export(session).digest
    begun, cancelled, hidden, seen = threading.Event(), threading.Event(), live.trainer.base.hidden, []

    def waits(rows):
        seen.append(rows)
        begun.set()
        assert cancelled.wait(20)
        return hidden(rows)

    who = {"request_id": "long", "session": "one", "fence": session.fence}
    many = {"data": [datum.model_dump() for seed in range(50) for datum in data(seed)]}
    prompts = [[5, 6, 7]]
    path, body = {
        "forward": ("/forward", {**who, "forward_input": many}),
        "export": ("/export", {**who, "kind": "revision", "probe_prompts": prompts, "probe_tokens": 24}),
        "probe": (
            "/probe",
            {"request_id": "long", "policy": "sums", "digest": digest, "prompts": prompts, "tokens": 24},
        ),
    }[kind]
    with monkeypatch.context() as patch:
        patch.setattr(live.trainer.base, "hidden", waits)
        live.client.http.post(path, json=body)
        assert begun.wait(20)
        live.client.cancel("long")
        cancelled.set()
        answer = live.client.http.get("/operations/long", params={"wait_s": 20}).json()
    assert (answer["state"], answer["kind"]) == ("cancelled", "Cancelled")
    # Rows, and the stream that they are packed in: one pass.
    assert len(seen) == 2
    assert [row.state for row in live.trainer.exporter.catalog.revisions.page("sums")] == ["snapshot"]


def test_a_client_waits_while_the_queue_is_full_and_counts_the_seconds(trainers, monkeypatch):
    monkeypatch.setattr(trainer, "SESSION_PLACES", 1)
    live = trainers.start()
    session = live.client.create_session("one", "sums", **NEW)
    release, begun = threading.Event(), threading.Event()

    def blocks(_: Request) -> dict:
        begun.set()
        return {"released": release.wait(20)}

    live.trainer.submit(Request(request_id="long"), blocks)
    assert begun.wait(20)
    live.client.http.post("/forward", json=_forward(session, "waits"))
    full = live.client.http.post("/forward", json=_forward(session, "refused"))
    assert (full.status_code, int(full.headers["retry-after"]) >= 1) == (503, True)
    said = full.json()
    assert (said["kind"], said["queue"]["queue_state"], said["queue"]["queued"]) == (
        "Busy", "paused_rate_limit", 1,
    )  # fmt: skip
    with pytest.raises(Busy, match=r"1 operations.*at most 1"):
        live.client.forward(session, data(1))
    assert live.client.backpressure_s == {}
    live.client.busy_s = 20
    # A place becomes free once the client was refused for half a second, however long it takes to ask.
    waited = live.client.backpressure_s
    background(lambda: eventually(lambda: waited.get("one", 0) > 0.5) and release.set())
    began = time.monotonic()
    assert live.client.forward(session, data(1))
    assert 0 < waited["one"] <= time.monotonic() - began
    waiting = live.client.http.delete("/operations/waits")
    assert waiting.status_code == 200


def test_a_loss_without_a_number_is_refused_and_changes_nothing(live):
    session = live.client.create_session("one", "sums", **NEW)
    live.client.forward_backward(session, data(1))
    before, stored = gradients(live.session(session)), factors(live.session(session))
    broken = data(2)
    broken[1].loss_fn_inputs["advantages"].data[-1] = 0.0
    broken[1].loss_fn_inputs["logprobs"].data[-1] = -1e30
    with pytest.raises(ConfigError, match=r"sample 1\b.*finite"):
        live.client.forward_backward(session, broken)
    assert same(gradients(live.session(session)), before)
    assert same(factors(live.session(session)), stored)
    assert live.client.optim_step(session, ADAM)["step"] == 1


# A policy that is purged


def test_a_policys_sessions_are_forgotten_in_memory_and_on_disk(live, tmp_path):
    open_one = live.client.create_session("first", "sums", **NEW)
    other = live.client.create_session("other", "sorting", **NEW)
    step(live.client, open_one, 1)
    live.client.save_state(open_one, "kept")
    with pytest.raises(Conflict, match=r"'first'.*'a'"):
        live.client.forget_policy("sums")
    assert live.resident() == {"first", "other"}
    live.client.close_session(open_one)
    folder = live.trainer.sessions.directory / "first"
    # Whoever only asks removes nothing.
    assert live.client.forget_policy("sums", only_ask=True) == {}
    assert folder.is_dir()
    found = live.client.forget_policy("sums")
    assert found["sessions"] == 1
    assert found["bytes"] > 0
    assert not folder.exists()
    assert {row["session"] for row in live.client.sessions()} == {"other"}
    assert live.client.forget_policy("sums") == {"sessions": 0, "bytes": 0}
    # The name begins anew; nobody else lost anything.
    assert live.client.create_session("first", "sums", **NEW).step == 0
    step(live.client, other, 1)
