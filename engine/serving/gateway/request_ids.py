"""Ids of requests, which say to whom they were given: who rates an answer has to be who got it.

An id has 32 hex digits. The first 20 are random, or those of a trusted proxy's id; the last 12 are a hash of
them and of the key, which only this installation can compute. So nothing is kept by id, and every engine can
check one.
"""

import os
import re
from collections import OrderedDict
from collections.abc import Callable
from hmac import compare_digest

from engine.catalog.catalog import Key

PROXYS = re.compile(rb"[0-9a-f]{32}")
DIGITS, SEED_DIGITS = 32, 20
MOST_IDS = 1 << 16
# Returns a keyed hash (hex digits) of a purpose and some words.
Hash = Callable[..., str]


def new_seed(given: bytes | None) -> str:
    """Return 32 hex digits to make an id of: those of a trusted proxy, else random ones."""
    return given.decode() if given is not None and PROXYS.fullmatch(given) else os.urandom(16).hex()


def id_for(key: Key, seed: str, hashed: Hash) -> str:
    """Return the id of a request by this key."""
    return _id_for(key.id, seed, hashed)


def _id_for(name: str, seed: str, hashed: Hash) -> str:
    begin = seed[:SEED_DIGITS]
    return begin + hashed("request", name, begin)[: DIGITS - SEED_DIGITS]


def is_given_to(key: Key, request_id: str, hashed: Hash) -> bool:
    """Return whether the id of an answer, which may have an API's prefix, was given to this key."""
    digits = request_id[-DIGITS:]
    expected = (_id_for(name, digits, hashed) for name in key.names)
    return len(digits) == DIGITS and any(compare_digest(digits.encode(), one.encode()) for one in expected)


class RecentIds:
    """The ids that were seen last, at most `MOST_IDS`."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._seen

    def add(self, name: str) -> None:
        """Remember an id, and forget the oldest where there are too many."""
        self._seen[name] = None
        if len(self._seen) > MOST_IDS:
            self._seen.popitem(last=False)
