"""Imports of large libraries, without what they do and bring along for nothing."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# transformers imports them where they are installed, and nothing that we use of it needs them: 140 MB and a
# tenth of the time of an engine's imports.
UNUSED = ("sklearn", "scipy", "pandas")


@contextmanager
def lean_imports() -> Iterator[None]:
    """Import in this block without the libraries of `UNUSED`, and collect no garbage meanwhile.

    Almost nothing that imports make can be freed (17,000 of an engine's 790,000 objects), but each full
    collection walks over all of it: a fifth of the imports' time, and a pause of 0.3 s in the life of the
    process. What is made in the block stays out of later collections.
    """
    absent = [name for name in UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        for name in absent:
            sys.modules.pop(name, None)
