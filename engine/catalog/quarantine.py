"""Quarantine: revisions that are not loaded because their bytes fail their checksum."""

import time
from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, bindparam, delete, select

from engine.catalog import tables
from engine.catalog.access import Access
from engine.catalog.changes import tell

# Digests for one query.
CHUNK = 1024


class Quarantine:
    """The catalog's quarantine; `catalog.quarantine`."""

    def __init__(self, access: Access):
        self._access = access
        mark = access.mark
        self._find_reason = f"SELECT reason FROM quarantine WHERE policy = {mark} AND digest = {mark}"

    def add(self, policy: str, digest: str, reason: str) -> None:
        """Keep a revision with damaged bytes from being loaded; the first reason stays.

        Gateways learn of it by the change feed and drop the copies that they have.
        """
        row = {"policy": policy, "digest": digest, "reason": reason, "at": time.time()}
        with self._access.write() as connection:
            stone = self._access.insert(tables.quarantine).values(row).on_conflict_do_nothing()
            if connection.execute(stone).rowcount:
                tell(connection, policy)

    def reason(self, policy: str, digest: str) -> str | None:
        """Return why a revision is in quarantine; None when it is not."""
        rows = self._access.quick(self._find_reason, (policy, digest))
        return rows[0][0] if rows else None

    def among(self, digests: Sequence[str]) -> set[tuple[str, str]]:
        """Return which revisions (policy, digest) with these digests are in quarantine."""
        stones = tables.quarantine.c
        query = select(stones.policy, stones.digest)
        if not digests:
            return set()
        with self._access.read(self._access.single) as connection:
            between = query.where(stones.digest.between(min(digests), max(digests)))
            return {(policy, digest) for policy, digest in connection.execute(between)}

    def newest(self, limit: int) -> list[tuple[str, str, str]]:
        """Return at most `limit` quarantined revisions (policy, digest, reason), newest first."""
        stones = tables.quarantine.c
        query = select(stones.policy, stones.digest, stones.reason).order_by(stones.at.desc(), stones.digest)
        with self._access.read() as connection:
            return [
                (policy, digest, reason) for policy, digest, reason in connection.execute(query.limit(limit))
            ]

    def release(self, policy: str, digest: str) -> None:
        """End a revision's quarantine, if it is quarantined."""
        with self._access.write() as connection:
            lift_quarantine(connection, [(policy, digest)])


def lift_quarantine(connection: Connection, revisions: Iterable[tuple[str, str]]) -> None:
    """End the quarantine of these revisions (policy, digest), where they are quarantined."""
    stones = tables.quarantine.c
    if connection.execute(select(stones.policy).limit(1)).first() is None:
        return
    wanted = list(revisions)
    query = select(stones.policy, stones.digest)
    for at in range(0, len(wanted), CHUNK):
        some = wanted[at : at + CHUNK]
        held = connection.execute(query.where(stones.digest.in_({digest for _, digest in some}))).all()
        lifted = [{"of": of, "key": key} for of, key in held if (of, key) in some]
        if lifted:
            mine = (stones.policy == bindparam("of")) & (stones.digest == bindparam("key"))
            connection.execute(delete(tables.quarantine).where(mine), lifted)
