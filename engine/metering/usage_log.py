"""The usage log: one SQLite database of requests, of what tenants and keys have spent, and hourly roll-ups.

A request is a row `admitted`, written with its reservation before the request is forwarded, and `settled`
with what it used. Both are one transaction with the budgets' counters and the roll-ups, so that none of the
three can differ from the others. A commit survives a kill of the process; a power failure loses at most
`SYNC_S`.

Each gateway holds a lock on a file of its own. Once a gateway is dead, its open rows are closed as `unknown`
at what they had reserved.
"""

import calendar
import contextlib
import fcntl
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.errors import LimitReached

SYNC_S = 0.25
CHECK_S = 5.0
EXPORT_S = 60.0
BUSY_TIMEOUT_MS = 5000
DAY, MONTH = "day", "month"
# Days for which counters are kept: a month and its last requests.
KEPT_DAYS = 40
# Applied in order; `user_version` counts them.
SCHEMA = (
    """
    CREATE TABLE requests (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, gateway TEXT NOT NULL, at REAL NOT NULL,
        tenant TEXT NOT NULL, key TEXT NOT NULL, policy TEXT NOT NULL, revision TEXT NOT NULL,
        purpose TEXT NOT NULL, reserved INTEGER NOT NULL, state TEXT NOT NULL, status INTEGER,
        prompt INTEGER, completion INTEGER, settled_at REAL
    ) STRICT;
    CREATE INDEX requests_open ON requests (gateway) WHERE state = 'admitted';
    CREATE TABLE spent (
        subject TEXT NOT NULL, period TEXT NOT NULL, used INTEGER NOT NULL, reserved INTEGER NOT NULL,
        PRIMARY KEY (subject, period)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE hours (
        hour INTEGER NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL, policy TEXT NOT NULL,
        revision TEXT NOT NULL, purpose TEXT NOT NULL, requests INTEGER NOT NULL, prompt INTEGER NOT NULL,
        completion INTEGER NOT NULL, unknown INTEGER NOT NULL,
        PRIMARY KEY (hour, tenant, key, policy, revision, purpose)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE exported (file TEXT PRIMARY KEY, first INTEGER NOT NULL, last INTEGER NOT NULL) STRICT;
    """,
)
ADMIT = """
    INSERT INTO requests (id, gateway, at, tenant, key, policy, revision, purpose, reserved, state)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'admitted')
"""
CLOSE = """
    UPDATE requests SET state = ?, status = ?, prompt = ?, completion = ?, settled_at = ?, revision = ?
    WHERE seq = ? AND state = 'admitted'
"""
# Of a key and a tenant, for a day and a month.
COUNT = """
    INSERT INTO spent (subject, period, used, reserved)
    VALUES (?, ?, ?, ?), (?, ?, ?, ?), (?, ?, ?, ?), (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET used = used + excluded.used, reserved = reserved + excluded.reserved
"""
ROLL_UP = """
    INSERT INTO hours VALUES (?, ?, ?, ?, ?, ?, 1, ?, ?, ?)
    ON CONFLICT DO UPDATE SET requests = requests + 1, prompt = prompt + excluded.prompt,
        completion = completion + excluded.completion, unknown = unknown + excluded.unknown
"""
OPEN = """
    SELECT seq, id, tenant, key, policy, revision, purpose, at, reserved FROM requests
    WHERE state = 'admitted' AND gateway = ?
"""


@dataclass(frozen=True)
class Metered:
    """A request to meter; `revision` is a digest, empty for the base. `reserved` is its bound in tokens."""

    id: str
    tenant: str
    key: str
    policy: str
    revision: str
    purpose: str
    at: float
    reserved: int

    def counts(self, used: int, reserved: int) -> tuple[str | int, ...]:
        """Return the parameters of `COUNT`, for the periods in which the request was admitted."""
        day, month = periods(self.at)
        key, tenant = f"key:{self.key}", f"tenant:{self.tenant}"
        return (
            key, day, used, reserved, key, month, used, reserved,
            tenant, day, used, reserved, tenant, month, used, reserved,
        )  # fmt: skip


@dataclass(frozen=True)
class Budget:
    """A limit of tokens for one day or month; `subject` is `key:ID` or `tenant:NAME`."""

    subject: str
    period: str
    tokens: float


def periods(at: float) -> tuple[str, str]:
    """Return the day and the month (UTC) of a time: `2026-11-23`, `2026-11`."""
    return _periods(int(at // 3600))


@lru_cache(64)
def _periods(hour: int) -> tuple[str, str]:
    day = time.strftime("%Y-%m-%d", time.gmtime(hour * 3600))
    return day, day[:7]


def remaining_s(at: float, period: str) -> float:
    """Return the seconds until the day or the month of `at` ends."""
    moment = time.gmtime(at)
    if period == DAY:
        return 86400 - at % 86400
    year, month = (moment.tm_year + 1, 1) if moment.tm_mon == 12 else (moment.tm_year, moment.tm_mon + 1)
    return calendar.timegm((year, month, 1, 0, 0, 0)) - at


class UsageLog:
    """One gateway's access to the log in the directory `root`; for one thread, beside its own."""

    def __init__(self, root: Path):
        self.root, self.path = root, root / "usage.db"
        self.gateway = uuid.uuid4().hex
        create(self.path)
        self._alive = _alive_file(root, self.gateway)
        self._connection = connect(self.path)
        self._dirty = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="usage-log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; open rows stay and are closed by the next gateway."""
        self._closed.set()
        self._thread.join()
        self._sync()
        self._connection.close()
        os.close(self._alive)

    def admit(self, asked: Metered, budgets: Sequence[Budget] = ()) -> int:
        """Record a request and reserve its tokens; return its number for `settle`.

        Raises `LimitReached` when a budget has less left than the request reserves; nothing is then recorded.
        """
        with self._transaction() as connection:
            for budget in budgets:
                self._refuse_over(connection, asked, budget)
            connection.execute(COUNT, asked.counts(0, asked.reserved))
            values = (
                asked.id, self.gateway, asked.at, asked.tenant, asked.key, asked.policy, asked.revision,
                asked.purpose, asked.reserved,
            )  # fmt: skip
            number = connection.execute(ADMIT, values).lastrowid
        self._dirty = True
        assert number is not None
        return number

    def settle(self, number: int, asked: Metered, status: int, used: tuple[int, int] | None) -> None:
        """Record what a request used: (prompt, completion) tokens; None: not known, so what it reserved."""
        with self._transaction() as connection:
            close_row(connection, number, asked, status, used)
        self._dirty = True

    def _refuse_over(self, connection: sqlite3.Connection, asked: Metered, budget: Budget) -> None:
        period = periods(asked.at)[budget.period == MONTH]
        query = "SELECT used + reserved FROM spent WHERE subject = ? AND period = ?"
        row = connection.execute(query, (budget.subject, period)).fetchone()
        left = budget.tokens - (row[0] if row else 0)
        if asked.reserved > left:
            kind, _, name = budget.subject.partition(":")
            raise LimitReached(
                f"The {kind} {name!r} has {max(0, int(left))} of {int(budget.tokens)} tokens left in "
                f"{period}, and this request may take {asked.reserved}: its prompt and n times max_tokens. "
                "Ask for fewer tokens, or wait for the next period.",
                remaining_s(asked.at, budget.period),
                code="insufficient_quota",
            )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with writing(self._connection) as connection:
            yield connection

    def _keep(self) -> None:
        """Make commits durable, close rows of dead gateways, move settled rows to Parquet."""
        from engine.metering.raw_usage import export

        began = time.monotonic()
        due = {self._close_dead: began, lambda: export(self.root): began + EXPORT_S}
        every = dict(zip(due, (CHECK_S, EXPORT_S), strict=True))
        while not self._closed.wait(SYNC_S):
            self._sync()
            for work, at in list(due.items()):
                if time.monotonic() >= at:
                    due[work] = time.monotonic() + every[work]
                    # A busy database or a full disk: the next turn tries again.
                    with contextlib.suppress(sqlite3.Error, OSError):
                        work()

    def _sync(self) -> None:
        """Write the log's pages to the disk; SQLite itself does so at checkpoints alone."""
        if self._dirty:
            self._dirty = False
            with contextlib.suppress(OSError):
                file = os.open(f"{self.path}-wal", os.O_RDONLY)
                try:
                    os.fdatasync(file)
                finally:
                    os.close(file)

    def _close_dead(self) -> None:
        with closing(connect(self.path)) as connection:
            close_dead(self.root, connection)
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()


def create(path: Path) -> None:
    """Create the database or migrate it to the newest schema; readable by its owner alone."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        path.touch(mode=0o600)
    with closing(connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        with writing(connection):
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            for script in SCHEMA[version:]:
                for statement in filter(str.strip, script.split(";")):
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version={len(SCHEMA)}")


def connect(path: Path) -> sqlite3.Connection:
    """Open the database. Checkpoints, which wait for the disk, are the background thread's."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA wal_autocheckpoint=0")
    return connection


@contextmanager
def writing(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Run a transaction that takes the write lock at once."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def close_row(
    connection: sqlite3.Connection,
    number: int,
    asked: Metered,
    status: int | None,
    used: tuple[int, int] | None,
) -> None:
    """Close an open row, counters and roll-up included; a row that is closed already stays as it is."""
    prompt, completion = used or (None, None)
    state = "unknown" if used is None else "settled"
    values = (state, status, prompt, completion, time.time(), asked.revision, number)
    if not connection.execute(CLOSE, values).rowcount:
        return
    tokens = asked.reserved if used is None else sum(used)
    connection.execute(COUNT, asked.counts(tokens, -asked.reserved))
    connection.execute(
        ROLL_UP,
        (
            int(asked.at // 3600), asked.tenant, asked.key, asked.policy, asked.revision, asked.purpose,
            prompt or 0, completion or 0, 0 if used else asked.reserved,
        ),
    )  # fmt: skip


def close_dead(root: Path, connection: sqlite3.Connection) -> int:
    """Close the open rows of gateways that are gone as `unknown`; return how many there were."""
    closed = 0
    waiting = connection.execute("SELECT DISTINCT gateway FROM requests WHERE state = 'admitted'").fetchall()
    for (gateway,) in waiting:
        file = root / "gateways" / gateway
        if not _is_dead(file):
            continue
        with writing(connection):
            rows: list[Any] = connection.execute(OPEN, (gateway,)).fetchall()
            for number, *fields in rows:
                close_row(connection, number, Metered(*fields), None, None)
        closed += len(rows)
    for file in (root / "gateways").glob("*"):
        if _is_dead(file):
            file.unlink(missing_ok=True)
    return closed


def _alive_file(root: Path, gateway: str) -> int:
    """Create a gateway's file and lock it for as long as this process lives; return its descriptor."""
    folder = root / "gateways"
    folder.mkdir(exist_ok=True, mode=0o700)
    # Locked before it has the name that others look for.
    fresh = root / f"{gateway}.new"
    file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fresh.rename(folder / gateway)
    return file


def _is_dead(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True
