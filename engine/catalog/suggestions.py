"""Suggestions for malformed or unknown names. Reads are bounded: anybody may misspell."""

import difflib
import re
from collections.abc import Sequence

from sqlalchemy import or_, select, true

from engine.catalog import tables
from engine.catalog.records import served_name
from engine.catalog.revision_rows import HEX, prefix_range
from engine.catalog.routes import covered
from engine.catalog.unknown_names import UnknownNames
from engine.errors import NotFound

NEAREST = 5
# Digits that a similar digest shares, letters of a name to start with, rows read at most.
COMMON_DIGITS = 3
COMMON_LETTERS = 8
NEIGHBOURS = 1000
# Names compared letter by letter, up to 80 us each: a gateway's event loop waits for it.
ALIKE = 24
NEWEST = 100


class Suggestions(UnknownNames):
    """Errors that suggest similar names of an open catalog."""

    def unknown(self, policy: str) -> NotFound:
        """Return the error for an unknown policy, with up to 5 similar ones."""
        near = self.policies(policy)
        known = ", ".join(near) or "none"
        return NotFound(f"{super().unknown(policy)} Known policies: {known}.", near)

    def missing(self, policy: str, digest_prefix: str, patterns: Sequence[str] = ()) -> NotFound:
        """Return the error for an unknown revision, with up to 5 similar names that `patterns` cover."""
        digests = self._nearest_digests(policy, digest_prefix)
        nearest = [served_name(policy, digest) for digest in digests]
        if not nearest and self._knows(policy):
            return NotFound(f"Policy {policy!r} has no revisions in the catalog.")
        near = nearest or self.policies(policy, patterns)
        what = super().missing(policy, digest_prefix)
        return NotFound(f"{what} Nearest: {', '.join(near)}." if near else str(what), near)

    def policies(self, name: str, patterns: Sequence[str] = ()) -> list[str]:
        """Return up to 5 policies with names similar to this one, the closest first.

        With `patterns`, those of a tenant, only policies that they cover.
        """
        table = tables.policies.c
        name = re.sub(r"[^a-z0-9-]", "", name.lower())[:63]
        mine = or_(*(covered(table.name, pattern) for pattern in patterns)) if patterns else true()
        with self._access.read() as connection:
            for letters in range(min(len(name), COMMON_LETTERS), -1, -1):
                start = name[:letters]
                # "~" sorts after every character of a name.
                alike = select(table.name).where(table.name >= start, table.name < start + "~", mine)
                # Neighbours in sorted order share the longest prefixes.
                after = alike.where(table.name >= name).order_by(table.name)
                before = alike.where(table.name < name).order_by(table.name.desc())
                sides = (connection.execute(side.limit(ALIKE // 2)).scalars() for side in (after, before))
                if names := [near for side in sides for near in side]:
                    return difflib.get_close_matches(name, names, n=NEAREST, cutoff=0.0)
        return []

    def _nearest_digests(self, policy: str, prefix: str) -> list[str]:
        table = tables.revisions.c
        match = HEX.match(prefix.lower())
        digits = match.group() if match else ""
        newest = select(table.digest).where(table.policy == policy)
        queries = [newest.order_by(table.created_at.desc(), table.id.desc()).limit(NEWEST)]
        between = prefix_range(digits[:COMMON_DIGITS])
        if between and len(digits) >= COMMON_DIGITS:
            # As in `RevisionRows.standing`: by the key of revisions, not by the index on policies.
            alike = select(table.digest).where(table.digest >= between[0], table.digest <= between[1])
            queries.append(alike.where(table.policy.concat("") == policy).limit(NEIGHBOURS))
        with self._access.read() as connection:
            digests = {digest.hex() for query in queries for digest in connection.execute(query).scalars()}
        return sorted(digests, key=lambda digest: (-_shared(digest, digits), digest))[:NEAREST]

    def _knows(self, policy: str) -> bool:
        table = tables.policies.c
        return self._access.scalar(select(table.name).where(table.name == policy)) is not None


def _shared(one: str, other: str) -> int:
    """Return how many characters two words share at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))
