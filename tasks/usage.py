"""What `graftwork usage` shows: hourly roll-ups of the usage log, with prices."""

import csv
import io
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, ServiceError
from engine.settings.params import Params

SUBJECTS = ("tenant", "key", "policy", "revision")
MILLION = 1_000_000


def usage_by(
    params: Params, by: str, begin: str | None = None, end: str | None = None
) -> list[dict[str, Any]]:
    """Return requests and tokens by subject and purpose, the most tokens first; none without a usage log.

    With a catalog on a server they are all machines', as they were a few seconds ago.

    `begin` and `end` are ISO times (UTC); the hours from `begin` on and before `end` count. Raises
    `ConfigError` for an unknown subject or another form of time.
    """
    from engine.catalog.access import Access, sqlite_path
    from engine.metering.shared_usage import sums_by

    if by not in SUBJECTS:
        raise ConfigError(f"Usage is summed up by {', '.join(SUBJECTS)}, not by {by!r}.")
    hours = hour_of(begin, "--from", 0), hour_of(end, "--to", 1 << 30)
    if sqlite_path(params.paths.catalog_url) is None:
        with closing(Access(params.paths.catalog_url)) as access:
            sums = sums_by(access, by, *hours)
    else:
        sums = _of_this_machine(params.paths.usage / "usage.db", by, hours)
    rows = [_row(params, by, row) for row in sums]
    return sorted(rows, key=lambda row: (-row["tokens"], row[by]))


def _of_this_machine(path: Path, by: str, hours: tuple[int, int]) -> list[tuple[Any, ...]]:
    if not path.is_file():
        return []
    columns = f"{by}, purpose, sum(requests), sum(prompt), sum(completion), sum(unknown)"
    query = f"SELECT {columns} FROM hours WHERE hour >= ? AND hour < ? GROUP BY {by}, purpose"
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            return connection.execute(query, hours).fetchall()
    except sqlite3.Error as error:
        raise ServiceError(f"The usage log {path} cannot be read: {error}.") from None


def _row(params: Params, by: str, row: Sequence[Any]) -> dict[str, Any]:
    name, purpose, requests, prompt, completion, unknown = row
    prices = params.prices
    # What is not known was reserved, mostly for a completion.
    price = (prompt * prices.prompt + (completion + unknown) * prices.completion) / MILLION
    return {
        by: name or "base",
        "purpose": purpose,
        "requests": requests,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "unknown_tokens": unknown,
        "tokens": prompt + completion + unknown,
        "price": round(price, 6),
    }


def hour_of(text: str | None, option: str, otherwise: int) -> int:
    """Return the hour (since the epoch) of an ISO time in UTC. Raises `ConfigError` for another form."""
    if text is None:
        return otherwise
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{option} {text!r} is not a time. Write 2026-11-01 or 2026-11-01T12.") from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() // 3600)


def as_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV with a header."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()
