"""Rows of the usage log: its schema, what a request's row says, and the transaction that closes one."""

import calendar
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import ConfigError, LimitReached

BUSY_TIMEOUT_MS = 5000
DAY, MONTH = "day", "month"
# Days for which counters are kept: a month and its last requests.
KEPT_DAYS = 40
# Applied in order; `user_version` counts them.
SCHEMA = (
    """
    CREATE TABLE requests (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL, gateway TEXT NOT NULL, at REAL NOT NULL,
        tenant TEXT NOT NULL, key TEXT NOT NULL, policy TEXT NOT NULL, revision TEXT NOT NULL,
        purpose TEXT NOT NULL, reserved INTEGER NOT NULL, state TEXT NOT NULL, status INTEGER,
        prompt INTEGER, completion INTEGER, settled_at REAL
    ) STRICT;
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
    CREATE TABLE drawn (
        subject TEXT NOT NULL, period TEXT NOT NULL, tokens INTEGER NOT NULL, PRIMARY KEY (subject, period)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE exported (file TEXT PRIMARY KEY, first INTEGER NOT NULL, last INTEGER NOT NULL) STRICT;
    """,
    # No number of tokens is negative.
    """
    ALTER TABLE requests RENAME TO requests_1;
    CREATE TABLE requests (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL, gateway TEXT NOT NULL, at REAL NOT NULL,
        tenant TEXT NOT NULL, key TEXT NOT NULL, policy TEXT NOT NULL, revision TEXT NOT NULL,
        purpose TEXT NOT NULL, reserved INTEGER NOT NULL CHECK (reserved >= 0), state TEXT NOT NULL,
        status INTEGER, prompt INTEGER CHECK (prompt >= 0), completion INTEGER CHECK (completion >= 0),
        settled_at REAL
    ) STRICT;
    INSERT INTO requests SELECT seq, id, gateway, at, tenant, key, policy, revision, purpose, reserved, state,
        status, max(prompt, 0), max(completion, 0), settled_at FROM requests_1;
    DROP TABLE requests_1;
    ALTER TABLE spent RENAME TO spent_1;
    CREATE TABLE spent (
        subject TEXT NOT NULL, period TEXT NOT NULL, used INTEGER NOT NULL CHECK (used >= 0),
        reserved INTEGER NOT NULL, PRIMARY KEY (subject, period)
    ) STRICT, WITHOUT ROWID;
    INSERT INTO spent SELECT subject, period, max(used, 0), reserved FROM spent_1;
    DROP TABLE spent_1;
    ALTER TABLE hours RENAME TO hours_1;
    CREATE TABLE hours (
        hour INTEGER NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL, policy TEXT NOT NULL,
        revision TEXT NOT NULL, purpose TEXT NOT NULL, requests INTEGER NOT NULL,
        prompt INTEGER NOT NULL CHECK (prompt >= 0), completion INTEGER NOT NULL CHECK (completion >= 0),
        unknown INTEGER NOT NULL CHECK (unknown >= 0),
        PRIMARY KEY (hour, tenant, key, policy, revision, purpose)
    ) STRICT, WITHOUT ROWID;
    INSERT INTO hours SELECT hour, tenant, key, policy, revision, purpose, requests, max(prompt, 0),
        max(completion, 0), max(unknown, 0) FROM hours_1;
    DROP TABLE hours_1;
    """,
    # What the catalog that machines share has of this log: the rows that may still change, from an hour on.
    """
    CREATE TABLE log (id TEXT NOT NULL, turn INTEGER NOT NULL, since INTEGER NOT NULL) STRICT;
    INSERT INTO log VALUES (lower(hex(randomblob(16))), 0, 0);
    CREATE TABLE copied (
        hour INTEGER NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL, policy TEXT NOT NULL,
        revision TEXT NOT NULL, purpose TEXT NOT NULL, requests INTEGER NOT NULL, prompt INTEGER NOT NULL,
        completion INTEGER NOT NULL, unknown INTEGER NOT NULL, open INTEGER NOT NULL,
        reserved INTEGER NOT NULL,
        PRIMARY KEY (hour, tenant, key, policy, revision, purpose)
    ) STRICT, WITHOUT ROWID;
    ALTER TABLE requests ADD COLUMN repeated INTEGER NOT NULL DEFAULT 0;
    """,
)
CLOSE = """
    UPDATE requests SET state = ?, status = ?, prompt = ?, completion = ?, settled_at = ?, revision = ?
    WHERE seq = ? AND state = 'admitted'
"""
# Of a key or a tenant, for a day or a month.
COUNT = """
    INSERT INTO spent (subject, period, used, reserved) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET used = used + excluded.used, reserved = reserved + excluded.reserved
"""
ADMIT = """
    INSERT INTO requests (id, gateway, at, tenant, key, policy, revision, purpose, reserved, repeated, state)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'admitted')
"""
ROLL_UP = """
    INSERT INTO hours VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET requests = requests + excluded.requests, prompt = prompt + excluded.prompt,
        completion = completion + excluded.completion, unknown = unknown + excluded.unknown
"""


class Metered(NamedTuple):
    """A request to meter; `revision` is a digest, empty for the base. `reserved` is its bound in tokens.

    `repeated`: where this engine dies before it answers, the proxy in front asks another one, which bills it.
    """

    id: str
    tenant: str
    key: str
    policy: str
    revision: str
    purpose: str
    at: float
    reserved: int
    repeated: int = 0


class Budget(NamedTuple):
    """A limit of tokens for one day or month; `subject` is `key:ID` or `tenant:NAME`."""

    subject: str
    period: str
    tokens: float


# Number, request, status and used tokens of a request that has ended; a request that asks, and its budgets.
Ended = tuple[int, Metered, int, tuple[int, int] | None]
Asked = tuple[Metered, Sequence[Budget]]


class Shortage(Exception):
    """This machine has drawn `missing` tokens too few of a budget that it shares."""

    def __init__(self, budget: Budget, period: str, missing: int, refusal: LimitReached):
        super().__init__(budget, period, missing, refusal)
        self.budget, self.period, self.missing, self.refusal = budget, period, missing, refusal


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


def create(path: Path) -> None:
    """Create the database or migrate it to the newest schema; readable by its owner alone.

    Raises `ConfigError` for one that a newer version has written.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        path.touch(mode=0o600)
    with closing(connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        with writing(connection):
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > len(SCHEMA):
                raise ConfigError(
                    f"{path} has schema {version}, and this version of Graftwork knows {len(SCHEMA)}. "
                    "Use the newer version, or set another state_dir."
                )
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


class Spending:
    """What one transaction changes of the counters of keys and tenants, and of the hours; written at its end.

    Many requests are of one key: their changes are added up before they are written.
    """

    def __init__(self, connection: sqlite3.Connection, is_shared: bool = False):
        self._connection, self._is_shared = connection, is_shared
        # By subject and period: tokens used and reserved.
        self._counts: dict[tuple[str, str], list[int]] = {}
        # By the columns of the key of `hours`: requests, and tokens of prompts, completions and unknown ones.
        self._hours: dict[tuple[Any, ...], list[int]] = {}

    def reserve(self, asked: Metered) -> None:
        """Count a request that is admitted."""
        self._count(asked, 0, asked.reserved)

    def spend(self, asked: Metered, used: tuple[int, int] | None) -> None:
        """Count what a request has used, for the periods in which it was admitted; None: as reserved."""
        self._count(asked, asked.reserved if used is None else sum(used), -asked.reserved)
        _, tenant, key, policy, revision, purpose, at, reserved, _ = asked
        row = (int(at // 3600), tenant, key, policy, revision, purpose)
        prompt, completion = used or (0, 0)
        _add(self._hours, row, 1, prompt, completion, reserved if used is None else 0)

    def _count(self, asked: Metered, used: int, reserved: int) -> None:
        day, month = periods(asked.at)
        key, tenant = f"key:{asked.key}", f"tenant:{asked.tenant}"
        for subject in ((key, day), (key, month), (tenant, day), (tenant, month)):
            _add(self._counts, subject, used, reserved)

    def refusal(self, asked: Metered, budgets: Sequence[Budget]) -> LimitReached | Shortage | None:
        """Return why a budget does not admit a request, or None."""
        return next((why for budget in budgets if (why := self._refusal(asked, budget))), None)

    def _refusal(self, asked: Metered, budget: Budget) -> LimitReached | Shortage | None:
        period = periods(asked.at)[budget.period == MONTH]
        subject = budget.subject, period
        query = "SELECT used + reserved FROM spent WHERE subject = ? AND period = ?"
        spent = self._connection.execute(query, subject).fetchone()
        most = budget.tokens
        if self._is_shared:
            query = "SELECT tokens FROM drawn WHERE subject = ? AND period = ?"
            drawn = self._connection.execute(query, subject).fetchone()
            most = min(most, drawn[0] if drawn else 0)
        left = int(most - (spent[0] if spent else 0) - sum(self._counts.get(subject, ())))
        if asked.reserved <= left:
            return None
        kind, _, name = budget.subject.partition(":")
        refusal = LimitReached(
            f"The {kind} {name!r} has {max(0, left)} of {int(budget.tokens)} tokens left in {period}, and "
            f"this request may take {asked.reserved}: its prompt and n times max_tokens. Ask for fewer, or "
            "wait for the next period.",
            remaining_s(asked.at, budget.period),
            code="insufficient_quota",
        )
        if not self._is_shared:
            return refusal
        return Shortage(budget, period, asked.reserved - left, refusal)

    def write(self) -> None:
        """Write the counters."""
        for statement, changes in ((COUNT, self._counts), (ROLL_UP, self._hours)):
            self._connection.executemany(statement, [(*row, *added) for row, added in changes.items()])


def _add(sums: dict[Any, list[int]], row: Any, *added: int) -> None:
    found = sums.get(row)
    sums[row] = [*added] if found is None else [one + other for one, other in zip(found, added, strict=True)]


def admit_row(connection: sqlite3.Connection, spending: Spending, gateway: str, asked: Metered) -> int:
    """Write the row of a request that is admitted; return its number."""
    values = (
        asked.id, gateway, asked.at, asked.tenant, asked.key, asked.policy, asked.revision, asked.purpose,
        asked.reserved, asked.repeated,
    )  # fmt: skip
    number = connection.execute(ADMIT, values).lastrowid
    assert number is not None
    spending.reserve(asked)
    return number


def close_row(
    connection: sqlite3.Connection,
    spending: Spending,
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
    spending.spend(asked, used)


class UsageRows:
    """One gateway's rows in the log at `path`; for one thread. `is_shared`: machines share the budgets."""

    def __init__(self, path: Path, gateway: str, is_shared: bool):
        create(path)
        self.path, self.gateway, self._is_shared = path, gateway, is_shared
        self._connection = connect(path)
        # Something is committed that a power failure may undo.
        self._dirty = False

    def record(self, ended: Iterable[Ended], asking: Iterable[Asked]) -> list[int | LimitReached | Shortage]:
        """Settle requests that have ended and admit those that ask, in one commit, which costs most of it.

        Return of each that asks its number for `settle`, or why it is refused: a budget has less left than it
        reserves (`LimitReached`), or it is shared and this machine has drawn less (`Shortage`).
        """
        with writing(self._connection) as connection:
            spending = Spending(connection, self._is_shared)
            for number, asked, status, used in ended:
                close_row(connection, spending, number, asked, status, used)
            answers = [
                spending.refusal(asked, budgets) or admit_row(connection, spending, self.gateway, asked)
                for asked, budgets in asking
            ]
            spending.write()
        self._dirty = True
        return answers

    def admit(self, asked: Metered, budgets: Sequence[Budget] = ()) -> int:
        """Record a request and reserve its tokens; return its number for `settle`.

        Raises why it is refused, as `record` returns it. Nothing is then recorded.
        """
        (answer,) = self.record((), [(asked, budgets)])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def settle(self, number: int, asked: Metered, status: int, used: tuple[int, int] | None) -> None:
        """Record what a request used: (prompt, completion) tokens; None: not known, so what it reserved."""
        self.record([(number, asked, status, used)], ())
