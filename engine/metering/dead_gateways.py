"""Gateways that are alive hold a lock on a file of their own; open rows of the others are closed."""

import sqlite3
from pathlib import Path
from typing import Any

from engine.file_lock import create_locked, has_holder
from engine.metering.usage_rows import Metered, Spending, begin, close_row

OPEN = """
    SELECT seq, id, tenant, key, policy, revision, purpose, at, reserved, repeated FROM requests
    WHERE state = 'admitted' AND gateway = ?
"""


def close_dead(root: Path, connection: sqlite3.Connection) -> int:
    """Close the open rows of gateways that are gone, mostly as `unknown`; return how many there were."""
    closed = 0
    for file in (root / "gateways").glob("*"):
        if has_holder(file, gone=False):
            continue
        with begin(connection):
            spending = Spending(connection)
            rows: list[Any] = connection.execute(OPEN, (file.name,)).fetchall()
            for number, *fields in rows:
                request = Metered(*fields)
                # What another engine was asked in its place is billed there, and counted there.
                used, requests = ((0, 0), 0) if request.repeated else (None, 1)
                close_row(connection, spending, number, request, None, used, requests)
            spending.write()
        closed += len(rows)
        file.unlink(missing_ok=True)
    return closed


def alive_file(root: Path, gateway: str) -> int:
    """Create a gateway's file and lock it for as long as this process lives; return its descriptor."""
    folder = root / "gateways"
    folder.mkdir(exist_ok=True, mode=0o700)
    return create_locked(root / f"{gateway}.new", folder / gateway)
