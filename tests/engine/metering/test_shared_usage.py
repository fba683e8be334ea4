"""Usage on a disk that is lost: the catalog that machines share has a copy of all that is billed."""

import random
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from engine.catalog import tables
from engine.catalog.access import Access
from engine.catalog.catalog import migrate
from engine.errors import ServiceError
from engine.metering import shared_usage, usage_upkeep
from engine.metering.dead_gateways import close_dead
from engine.metering.shared_budgets import SharedBudgets
from engine.metering.shared_usage import SharedUsage, sums_by
from engine.metering.usage_log import UsageEntry, UsageLog
from engine.metering.usage_rows import Metered, connect
from engine.settings.params import Params
from tasks.usage import usage_by
from tests.helpers.live import eventually
from tests.helpers.postgres import fresh_database

EVER = 0, 1 << 30


def asked(number: int, tenant: str = "acme", revision: str = "a" * 64, at: float | None = None) -> Metered:
    at = time.time() if at is None else at
    return Metered(f"r{number}", tenant, f"k-{tenant}", f"{tenant}-sums", revision, "user", at, 100)


@pytest.fixture
def access(catalog_url: str) -> Iterator[Access]:
    with closing(Access(catalog_url)) as access:
        yield access


class Machine:
    """A gateway's usage log, and its copier without the thread."""

    def __init__(self, root: Path, access: Access):
        self.root, self.log, self.copier = root, UsageLog(root), SharedUsage(root, access)

    def serve(self, number: int, used: tuple[int, int] | None = (7, 5), **asks: Any) -> None:
        self.log.settle(self.log.admit(asked(number, **asks)), 200, used)
        self.log.flush()

    def copy(self) -> bool:
        """Write what is in the journal, and copy."""
        self.log.flush()
        return self.copier.copy()

    def sums(self) -> list[tuple[Any, ...]]:
        """What the machine itself would bill by revision."""
        query = """
            SELECT revision, purpose, sum(requests), sum(prompt), sum(completion), sum(unknown) FROM hours
            GROUP BY 1, 2 ORDER BY 1
        """
        with closing(sqlite3.connect(self.root / "usage.db")) as connection:
            return connection.execute(query).fetchall()


@pytest.fixture
def machine(tmp_path: Path, access: Access) -> Iterator[Machine]:
    made = Machine(tmp_path / "one", access)
    yield made
    made.log.close()


def billed(access: Access, by: str = "revision") -> list[tuple[Any, ...]]:
    return sorted(sums_by(access, by, *EVER))


def grow_silent(access: Access) -> None:
    """Let every log have been silent for longer than a machine may be."""
    with access.write() as connection:
        connection.execute(update(tables.usage_logs).values(seen_at=1.0))


def test_the_copy_is_what_the_machine_itself_would_bill(machine: Machine, access: Access) -> None:
    """Over many turns, with requests that are open for days, and other revisions at the end."""
    draw, waiting = random.Random(7), list[UsageEntry]()
    for number in range(300):
        # The log is older than its first copy.
        age_s = 0 if number > 50 else draw.choice([0, 3600, 90_000])
        one = asked(number, draw.choice(["acme", "umbrella"]), at=time.time() - age_s)
        waiting.append(machine.log.admit(one))
        while len(waiting) > 20:
            entry = waiting.pop(draw.randrange(len(waiting)))
            used = draw.choice([None, (draw.randrange(50), draw.randrange(50))])
            # The champion may have answered in a canary's place.
            machine.log.settle(entry, 200, used, draw.choice(["a", "b"]) * 64)
        if number > 50 and draw.random() < 0.3:
            assert machine.copy()
            assert billed(access) == machine.sums()
    for entry in waiting:
        machine.log.settle(entry, 200, (1, 1))
    machine.copy()
    assert billed(access) == machine.sums()
    with access.read() as connection:
        left = connection.execute(select(tables.usage_hours.c.open, tables.usage_hours.c.reserved)).all()
    assert set(left) == {(0, 0)}


def test_what_was_open_on_a_lost_disk_counts_as_reserved(machine: Machine, access: Access) -> None:
    machine.serve(1)
    entry = machine.log.admit(asked(2))
    machine.copy()
    # The machine lives, and will say what became of it.
    assert billed(access) == [("a" * 64, "user", 1, 7, 5, 0)]
    grow_silent(access)
    assert billed(access) == [("a" * 64, "user", 2, 7, 5, 100)]
    # It comes back.
    machine.log.settle(entry, 200, (3, 4))
    machine.copy()
    assert billed(access) == [("a" * 64, "user", 2, 10, 9, 0)]


def test_what_a_proxy_asks_elsewhere_is_not_billed_on_a_lost_disk(machine: Machine, access: Access) -> None:
    machine.log.admit(asked(1)._replace(repeated=1))
    machine.copy()
    grow_silent(access)
    assert billed(access) == []


def test_the_command_adds_up_all_machines(tmp_path: Path, postgres_server: str) -> None:
    url = fresh_database(postgres_server)
    migrate(url)
    settings = Params.model_validate({"state_dir": tmp_path, "catalog": {"url": url}})
    assert usage_by(settings, "tenant") == []
    with closing(Access(url)) as access:
        for name in ("one", "other"):
            machine = Machine(tmp_path / name, access)
            machine.serve(1)
            machine.copier.copy()
            machine.log.close()
    (found,) = usage_by(settings, "tenant")
    assert (found["tenant"], found["requests"], found["tokens"]) == ("acme", 2, 24)
    assert usage_by(settings, "tenant", end="2020-01-01") == []


def test_a_pod_that_is_deleted_leaves_its_bill(
    tmp_path: Path, catalog_url: str, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At SIGTERM everything; the directory goes, and its successor adds to it."""
    monkeypatch.setattr(usage_upkeep, "SHARE_S", 600.0)
    for turn in (1, 2):
        shared = SharedBudgets(catalog_url)
        log = UsageLog(tmp_path / "pod", shared)
        log.settle(log.admit(asked(turn)), 200, (7, 5))
        log.flush()
        log.upkeep.hand_over()
        log.close()
        shared.close()
        shutil.rmtree(tmp_path / "pod")
        assert billed(access, "tenant") == [("acme", "user", turn, 7 * turn, 5 * turn, 0)]


def test_a_running_gateway_copies_by_itself(
    tmp_path: Path, catalog_url: str, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_upkeep, "SHARE_S", 0.05)
    with closing(SharedBudgets(catalog_url)) as shared, closing(UsageLog(tmp_path / "one", shared)) as log:
        log.settle(log.admit(asked(1)), 200, (7, 5))
        log.flush()
        assert eventually(lambda: billed(access) == [("a" * 64, "user", 1, 7, 5, 0)])


def test_two_gateways_of_a_machine_copy_one_log(machine: Machine, access: Access) -> None:
    other = SharedUsage(machine.root, access)
    for turn in range(6):
        entry = machine.log.admit(asked(turn))
        machine.log.flush()
        (machine.copier, other)[turn % 2].copy()
        machine.log.settle(entry, 200, (7, 5))
        machine.log.flush()
        (other, machine.copier)[turn % 2].copy()
        assert billed(access) == machine.sums()


def test_a_catalog_of_yesterday_gets_everything_again(machine: Machine, access: Access) -> None:
    """A restore, or a crash between the two commits: neither loses a row nor counts one twice."""
    for number in range(3):
        machine.serve(number, at=time.time() - number * 90_000)
    for number in range(3, 6):
        machine.copier.copy()
        machine.serve(number)
    with access.write() as connection:
        # As of the first copy.
        connection.execute(update(tables.usage_logs).values(turn=1))
        connection.execute(update(tables.usage_hours).values(requests=0, prompt=0, completion=0))
    machine.serve(9)
    machine.copier.copy()
    assert billed(access) == machine.sums()


def test_a_catalog_that_is_silent_is_told_later(
    machine: Machine, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(is_alone: bool = True) -> Any:
        raise ServiceError("The catalog cannot be written.")

    machine.serve(1)
    monkeypatch.setattr(access, "write", silent)
    with pytest.raises(ServiceError):
        machine.copier.copy()
    monkeypatch.undo()
    machine.copier.copy()
    assert billed(access) == machine.sums()


def test_a_quiet_machine_asks_the_catalog_for_nothing_but_a_beat(
    machine: Machine, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.serve(1)
    machine.copier.copy()
    writes, write = [], access.write
    monkeypatch.setattr(access, "write", lambda is_alone=True: (writes.append(is_alone), write(is_alone))[1])
    for _ in range(3):
        machine.copier.copy()
    assert writes == []
    monkeypatch.setattr(shared_usage, "BEAT_S", 0.0)
    grow_silent(access)
    writes.clear()
    machine.copier.copy()
    # Beside the controller's transactions, which take turns.
    assert writes == [False]
    with access.read() as connection:
        (seen_at,) = connection.execute(select(tables.usage_logs.c.seen_at)).scalars()
    assert seen_at > 1.0


def test_requests_that_a_killed_gateway_left_are_told_as_unknown(machine: Machine, access: Access) -> None:
    machine.log.admit(asked(1))
    machine.copy()
    with closing(connect(machine.root / "usage.db")) as connection:
        connection.execute("UPDATE requests SET gateway = 'dead'")
        (machine.root / "gateways" / "dead").touch()
        close_dead(machine.root, connection)
    machine.copier.copy()
    assert billed(access) == [("a" * 64, "user", 1, 0, 0, 100)]
