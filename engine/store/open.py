"""Open the store that the settings name."""

from pathlib import Path

from engine.settings.params import Params
from engine.store.cache import Cache
from engine.store.remote import RemoteStore
from engine.store.segments import Store


def open_store(params: Params) -> Store:
    """Return the store of these settings: a local directory, or a URL with a local cache."""
    url = params.store.url
    if url is None:
        return Store(params.paths.store)
    if url.startswith("file://"):
        return Store(Path(url.removeprefix("file://")))
    return RemoteStore(url, params.paths.holds, Cache(params.paths.cache, params.store.cache_bytes))
