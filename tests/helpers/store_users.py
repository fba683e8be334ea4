"""What other processes do with a store, in a module of few imports: each of them starts anew."""

import hashlib
import os
from pathlib import Path

from engine.settings.params import Params
from engine.store.cache import Cache
from engine.store.open import open_store
from engine.store.segments import Location


def blob(number: int, size: int = 100) -> tuple[Location, bytes]:
    data = number.to_bytes(4, "big") * (size // 4)
    return Location("0" * 32 + ".seg", 0, len(data), hashlib.sha256(data).hexdigest()), data


def fill_cache(root: Path, seed: int) -> None:
    cache = Cache(root, 2_000)
    for i in range(60):
        number = (i * 7 + seed) % 30
        location, data = blob(number)
        path = cache.find(location) or cache.add(location, [data])
        try:
            assert path.read_bytes() == data
        except FileNotFoundError:
            continue
    cache.close()


def die_after_append(params: Params) -> None:
    open_store(params).append(b"left behind")
    os._exit(1)
