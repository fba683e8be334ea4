"""Gateways that are gone: what their journals still have is written, and their open rows are closed.

A journal is the file whose lock says that its gateway lives. Each line is a JSON array: its number, its kind,
and

- `ADMITTED`: the fields of `Metered`;
- `BEGUN`: the number of the request's first line, its row in the database or null;
- `ENDED`: the same two, then revision, status, and used tokens (prompt, completion) or null.
"""

import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from engine.file_lock import has_holder
from engine.metering.usage_rows import (
    HAS_BEGUN,
    Metered,
    Spending,
    add_row,
    begin,
    close_row,
    counters,
    release,
)

ADMITTED, BEGUN, ENDED = "a", "b", "e"
JOURNALS = "gateways"
ROW = "SELECT seq, id, tenant, key, policy, revision, purpose, at, reserved, repeated FROM requests"
OPEN = f"{ROW} WHERE state = 'admitted' AND gateway = ?"
log = logging.getLogger("graftwork.usage")


def close_dead(root: Path, connection: sqlite3.Connection) -> int:
    """Close the open rows of gateways that are gone, mostly as `unknown`; return how many there were."""
    closed = 0
    for file in (root / JOURNALS).glob("*"):
        if has_holder(file, gone=False):
            continue
        gateway = file.name
        with begin(connection):
            spending = Spending(connection)
            query = "SELECT written FROM gateways WHERE gateway = ?"
            written = connection.execute(query, (gateway,)).fetchone()
            if written:
                _write_journal(file, written[0], connection, spending)
            rows: list[Any] = connection.execute(OPEN, (gateway,)).fetchall()
            for row, *fields in rows:
                request = Metered(*fields)
                # What another engine was asked in its place is billed there, and counted there.
                used, requests = ((0, 0), 0) if request.repeated else (None, 1)
                close_row(connection, spending, row, request, None, used, requests)
                if not written:
                    # Of version 3, where each request was reserved by itself.
                    for subject, period in counters(request):
                        spending.reserve(subject, period, -request.reserved)
            release(connection, spending, gateway)
            spending.write()
            connection.execute("DELETE FROM gateways WHERE gateway = ?", (gateway,))
        closed += len(rows)
        file.unlink(missing_ok=True)
    return closed


def _write_journal(file: Path, after: int, connection: sqlite3.Connection, spending: Spending) -> None:
    """Write what the lines of a journal behind line `after` say."""
    rows: dict[int, int] = {}
    for number, kind, fields in lines(file, after):
        if kind == ADMITTED:
            rows[number] = add_row(connection, file.name, Metered(*fields))
            continue
        first, known_row, *rest = fields
        its_row = rows.get(first) if known_row is None else known_row
        found = connection.execute(f"{ROW} WHERE seq = ? AND gateway = ?", (its_row, file.name)).fetchone()
        if found is None:
            # A power failure has undone the commit of the row, whose number may be another one's by now.
            continue
        row, *old = found
        if kind == BEGUN:
            connection.execute(HAS_BEGUN, (row,))
        else:
            revision, status, used = rest
            request = Metered(*old)._replace(revision=revision)
            close_row(connection, spending, row, request, status, used)


def lines(file: Path, after: int) -> Iterator[tuple[int, str, list[Any]]]:
    """Yield number, kind and fields of a journal's lines behind line number `after`, up to a damaged one."""
    # A line that a crash has cut off was never answered for.
    for line in file.read_bytes().split(b"\n")[:-1]:
        try:
            number, kind, *fields = orjson.loads(line)
        except (ValueError, TypeError):
            # Some file systems leave zeros where a power failure came before the bytes.
            log.warning("What %s has behind line %d is damaged, and nothing of it counts.", file, after)
            return
        if number > after:
            yield number, kind, fields
