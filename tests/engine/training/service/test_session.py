"""Sessions: killed at any moment they go on bit for bit; a request is applied once."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from engine.errors import BaseModelError, Conflict, NotFound, ServiceError
from engine.training.model.lora import ResidentBase
from engine.training.model.packing import Example, TokenRow
from engine.training.service import state
from engine.training.service.protocol import LoadState, OptimStep
from engine.training.service.session import CURRENT, Session, state_file
from engine.training.service.state import NAME
from tests.helpers.training_pass import gather
from tests.helpers.training_sessions import ADAM, BASE, factors, opening, same, train_one


def loading(name: str, request_id: str) -> LoadState:
    return LoadState(request_id=request_id, session="any", fence=0, name=name)


@pytest.fixture(scope="module")
def base(tiny_base) -> ResidentBase:
    return ResidentBase(tiny_base, threads=1, microbatch_tokens=256)


def test_a_session_that_was_cut_off_goes_on_bit_for_bit(base, tmp_path):
    whole = Session(tmp_path / "whole", base, BASE, opening())
    for number in range(6):
        train_one(whole, number)

    first = Session(tmp_path / "cut", base, BASE, opening())
    for number in range(3):
        train_one(first, number)
    # Gradients of a step that never ended, and a draft that was never renamed, are what a kill leaves.
    gather(first, [Example(TokenRow((5, 6, 7), 1), (-1.0, -1.0), (1.0, 1.0))])
    (tmp_path / "cut" / "current.draft").write_bytes(b"half")
    again = Session(tmp_path / "cut", base, BASE, opening())
    again.load(CURRENT)
    assert (again.step, again.position) == (3, 20)
    assert [row["reward"] for row in again.history] == [0.0, 0.1, 0.2]
    for number in range(3, 6):
        train_one(again, number)
    assert same(factors(whole), factors(again))
    assert torch.equal(whole.generator.get_state(), again.generator.get_state())
    start = Session(tmp_path / "start", base, BASE, opening())
    assert not same(factors(start), factors(whole))


def test_beside_eight_others_a_session_becomes_what_it_is_alone(base, tmp_path):
    """Five steps with the same samples; the others have other ranks, places and data, and come in between."""
    alone = Session(tmp_path / "alone", base, BASE, opening())
    for number in range(5):
        train_one(alone, number)
    beside = Session(tmp_path / "beside", base, BASE, opening())
    targets = (["q_proj"], ["v_proj", "up_proj"], ["down_proj", "gate_proj"])
    others = [
        Session(tmp_path / f"{i}", base, BASE, opening(f"o-{i}", rank=2 ** (i % 4), targets=targets[i % 3]))
        for i in range(8)
    ]
    for number in range(5):
        for i, other in enumerate(others):
            train_one(other, 100 + 10 * number + i)
            if i == 4:
                train_one(beside, number)
    moved = [
        torch.dist(a, b).item()
        for a, b in zip(factors(beside).values(), factors(alone).values(), strict=True)
    ]
    assert max(moved) <= 1e-5
    assert same(factors(beside), factors(alone))
    start = Session(tmp_path / "start", base, BASE, opening())
    assert not same(factors(start), factors(alone))


def test_the_same_request_is_applied_once_also_after_a_restart(base, tmp_path):
    session = Session(tmp_path, base, BASE, opening())
    train_one(session, 1, "first")
    once = factors(session)
    request = OptimStep(request_id="first", session=session.name, fence=0, adam_params=ADAM)
    assert session.optim_step(request)["step"] == 1
    again = Session(tmp_path, base, BASE, opening())
    again.load(CURRENT)
    assert again.optim_step(request)["step"] == 1
    assert same(factors(again), once)


def test_a_step_without_gradients_is_refused(base, tmp_path):
    session = Session(tmp_path, base, BASE, opening())
    request = OptimStep(request_id="a", session=session.name, fence=0, adam_params=ADAM)
    with pytest.raises(ServiceError, match=r"no gradients.*step 0"):
        session.optim_step(request)
    skipped = session.optim_step(request.model_copy(update={"request_id": "b", "skip": True}))
    assert skipped == {"step": 1, "grad_norm": 0.0}


def test_going_back_to_a_named_state(base, tmp_path):
    session = Session(tmp_path, base, BASE, opening())
    train_one(session, 1)
    session.save("best")
    best = factors(session)
    train_one(session, 2)
    assert not same(factors(session), best)
    session.load("best")
    assert same(factors(session), best)
    with pytest.raises(NotFound, match="no state 'worst'"):
        session.load("worst")


def test_a_save_that_is_cut_off_anywhere_is_done_again_or_not_at_all(base, tmp_path, monkeypatch):
    """Each rename of a `save_state` is the last thing that happens once."""
    rename = Path.replace
    for survives in range(3):
        session = Session(tmp_path / str(survives), base, BASE, opening())
        train_one(session, 1)
        before, renamed = factors(session), []

        def cut_off(path, target, survives=survives, renamed=renamed):
            if len(renamed) == survives:
                raise KeyboardInterrupt
            renamed.append(rename(path, target))

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(Path, "replace", cut_off)
            session.save_as("best", "save")
        again = Session(tmp_path / str(survives), base, BASE, opening())
        again.load()
        assert (again.step, again.is_done("save")) == (1, survives == 2)
        assert again.save_as("best", "save") == {"path": str(tmp_path / str(survives) / "best.state")}
        train_one(again, 2)
        # Answered, not done again: it would store the second step under that name.
        again.save_as("best", "save")
        assert again.load_from(loading("best", "load"))["step"] == 1
        assert same(factors(again), before)
        assert again.load_from(loading("best", "load"))["history"][-1]["step"] == 1


def test_a_state_of_a_version_before_265b009_is_refused(base, tmp_path):
    session = Session(tmp_path, base, BASE, opening())
    train_one(session, 1)
    torch.save({"version": 2, "history": session.history}, tmp_path / "current.state")
    with pytest.raises(ServiceError, match=r"version 2.*265b009"):
        Session(tmp_path, base, BASE, opening()).load()


@pytest.mark.long
def test_a_late_step_costs_what_an_early_one_costs(base, tmp_path, monkeypatch):
    """In bytes written, which do not depend on the machine; a step used to write all steps before it."""
    session = Session(tmp_path, base, BASE, opening())
    monkeypatch.setattr(os, "fsync", lambda _: None)
    record = {"reward": 0.5, "masked": {"outlier": 3}, "text": "x" * 500}

    def written(step: int) -> int:
        before = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
        request = OptimStep(request_id=f"{step:06d}", session="s", fence=0, skip=True, record=record)
        session.optim_step(request)
        grown = {path.name: path.stat().st_size - before.get(path.name, 0) for path in tmp_path.iterdir()}
        # The state is written whole, a journal at its end.
        return state_file(tmp_path).stat().st_size + sum(max(0, size) for size in grown.values())

    train_one(session, 1)
    sizes = [written(step) for step in range(2, 1002)]
    # Numbers of more digits.
    assert max(sizes[10:]) <= sizes[8] + 256
    assert len(session.history) == 1001


def test_a_step_is_stored_by_its_state_alone(base, tmp_path, monkeypatch):
    """A kill between journal and state: the step was not taken, and its line is written over."""
    session = Session(tmp_path, base, BASE, opening())
    train_one(session, 1)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(state, "write", killed)
        train_one(session, 2, "never")
    whole = (tmp_path / NAME).stat().st_size
    again = Session(tmp_path, base, BASE, opening())
    again.load()
    assert (again.step, again.journal.size < whole, again.is_done("never")) == (1, True, False)
    train_one(again, 3)
    last = Session(tmp_path, base, BASE, opening())
    last.load()
    assert [row["reward"] for row in last.history] == [0.1, 0.3]
    assert same(factors(last), factors(again))


def test_steps_after_going_back_follow_the_named_state(base, tmp_path):
    session = Session(tmp_path, base, BASE, opening())
    for step in (1, 2):
        train_one(session, step)
    session.save_as("best", "save")
    train_one(session, 3)
    session.load_from(loading("best", "load"))
    train_one(session, 4)
    session.save_as("other", "save-other")
    session.load_from(loading("best", "load-again"))
    session.load_from(loading("other", "load-other"))
    again = Session(tmp_path, base, BASE, opening())
    again.load()
    for held in (session, again):
        assert [row["reward"] for row in held.history] == [0.1, 0.2, 0.4]
        assert [row["step"] for row in held.journal.answer("load")["history"]] == [1, 2]
        assert held.row == held.history[-1]


@pytest.mark.parametrize("damage", ["cut", "gone", "scrambled"])
def test_a_damaged_journal_is_a_sentence(base, tmp_path, damage):
    session = Session(tmp_path, base, BASE, opening())
    train_one(session, 1)
    file = tmp_path / NAME
    content = file.read_bytes()
    file.unlink()
    if damage != "gone":
        file.write_bytes(content[:-5] if damage == "cut" else b"#" + content[1:])
    again = Session(tmp_path, base, BASE, opening())
    with pytest.raises(ServiceError, match=r"journal\.jsonl.*damaged"):
        again.load()


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_step_is_forced_to_the_disk_with_its_name(base, tmp_path, monkeypatch):
    """First the bytes, then after the renames the directory that holds the names."""
    session = Session(tmp_path, base, BASE, opening())
    fsync, rename, seen = os.fsync, Path.replace, []
    monkeypatch.setattr(os, "fsync", lambda handle: (seen.append(os.fstat(handle).st_ino), fsync(handle)))
    monkeypatch.setattr(Path, "replace", lambda path, to: (seen.append(to.name), rename(path, to)))
    session.save("best")
    bytes_of, names = ((tmp_path / "best.state").stat().st_ino, tmp_path.stat().st_ino)
    assert seen == [bytes_of, "best.state", "current.state", names]


def test_a_full_disk_keeps_the_last_step(base, tmp_path, monkeypatch):
    session = Session(tmp_path, base, BASE, opening())
    train_one(session, 1)
    stored = (tmp_path / "current.state").read_bytes()

    monkeypatch.setattr("engine.training.service.state.os.fsync", _full)
    with pytest.raises(ServiceError, match="No space left"):
        train_one(session, 2)
    assert (tmp_path / "current.state").read_bytes() == stored
    assert not (tmp_path / "current.draft").exists()


def test_a_request_repeated_after_a_full_disk_is_stored_and_applied_once(base, tmp_path, monkeypatch):
    session = Session(tmp_path / "full", base, BASE, opening())
    with monkeypatch.context() as patch:
        patch.setattr("engine.training.service.state.os.fsync", _full)
        with pytest.raises(ServiceError):
            train_one(session, 1)
    step = OptimStep(request_id="step-1", session=session.name, fence=0, adam_params=ADAM, position=10)
    assert session.optim_step(step)["step"] == 1

    again = Session(tmp_path / "full", base, BASE, opening())
    again.load(CURRENT)
    once = Session(tmp_path / "once", base, BASE, opening())
    train_one(once, 1)
    assert again.step == 1
    assert same(factors(again), factors(once))


def test_naming_and_going_back_are_done_when_repeated_after_a_full_disk(base, tmp_path, monkeypatch):
    session = Session(tmp_path, base, BASE, opening())
    train_one(session, 1)
    want = factors(session)
    requests = {
        "save": lambda name, id: session.save_as(name, id),
        "load": lambda name, id: session.load_from(loading(name, id)),
    }
    for request_id, request in requests.items():
        with monkeypatch.context() as patch:
            patch.setattr("engine.training.service.state.os.fsync", _full)
            with pytest.raises(ServiceError, match="No space left"):
                request("best", request_id)
        request("best", request_id)
        stored = Session(tmp_path, base, BASE, opening())
        stored.load()
        assert (stored.step, stored.is_done(request_id)) == (1, True)
        assert same(factors(stored), want)
        assert (tmp_path / "best.state").is_file()
        train_one(session, 2)


@pytest.mark.parametrize(
    ("base_digest", "changes", "error", "sentence"),
    [
        ("c" * 64, {}, BaseModelError, "base bbbbbbbbbbbb"),
        (BASE, {"rank": 2}, Conflict, "another session name"),
        (BASE, {"targets": ["o_proj"]}, Conflict, "another session name"),
    ],
)
def test_a_session_of_another_base_or_shape_is_refused(base, tmp_path, base_digest, changes, error, sentence):
    session = Session(tmp_path, base, BASE, opening())
    train_one(session, 1)
    with pytest.raises(error, match=sentence):
        Session(tmp_path, base, base_digest, opening(**changes)).load(CURRENT)
