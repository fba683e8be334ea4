"""How many copies of an adapter a machine holds: memory of all engine processes, and the page cache.

A page of the page cache that a process maps is in its PSS too, and is one page all the same: here what is
mapped of files counts as page cache, and of the processes what is their own (anonymous and shared memory).
What is written lies in the page cache too, so it is dropped from there before it is asked for; on tmpfs that
cannot be, and nothing is measured.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import _made
import _served
from _traffic import Ask, Client

from engine.settings.params import Params

SLOTS, BEYOND, HELD = 4, 6, 16
PROMPT = tuple(range(40, 48))
# Of a file, so much may stay when it is dropped; it then counts as growth.
LEFT = 0.01
LIBC = ctypes.CDLL(None, use_errno=True)


def pss(pid: int) -> dict[str, int]:
    """Return the proportional memory of a process by kind, bytes: Pss, Pss_Anon, Pss_File, Pss_Shmem."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    fields = (line.split() for line in lines)
    return {name.rstrip(":"): int(size) * 1024 for name, size, *_ in fields if name.startswith("Pss")}


def own_bytes(pids: Iterable[int]) -> int:
    """Return what processes have of memory that is no file's."""
    return sum(found["Pss_Anon"] + found["Pss_Shmem"] for found in map(pss, pids))


def cached_bytes(paths: Iterable[Path]) -> int:
    """Return how much of files is in the page cache."""
    return sum(map(_cached, paths))


def _cached(path: Path) -> int:
    size = path.stat().st_size
    if not size:
        return 0
    pages = -(-size // mmap.PAGESIZE)
    states = (ctypes.c_ubyte * pages)()
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        failed = LIBC.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), states)
        # The mapping cannot close while something points into it.
        del start
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {path}: {os.strerror(ctypes.get_errno())}")
    return sum(state & 1 for state in states) * mmap.PAGESIZE


def measure(given: Params, client: Client, beside: Path, held: int = HELD) -> dict[str, float]:
    """Return the memory for each adapter of `many-moe` over its bytes, with one and with two engines."""
    found: dict[str, float] = {}
    shape = _served.SHAPES["many-moe"]
    with ExitStack() as stack:
        first = stack.enter_context(_served.live(given, "many-moe", beside, slots=SLOTS, host_bytes=8 << 30))
        maker = _made.Maker(first.params, first.base, "density", shape.rank, shape.torch_dtype)
        stack.callback(maker.close)
        engines = [first]
        for count in (1, 2):
            if count == 2:
                engines.append(stack.enter_context(_served.second(first)))
            found[f"density.n{count}"] = _growth(client, engines, maker, held)
    return found


def _growth(client: Client, engines: Sequence[_served.Live], maker: _made.Maker, held: int) -> float:
    """Fill the slots; then return the growth for each further adapter that every engine is asked for."""
    _ask(client, engines, maker.make(SLOTS + BEYOND))
    before = _memory(engines, [])
    known = list(maker.segments)
    names = maker.make(held)
    fresh = [path for path in maker.segments if path not in known]
    drop(fresh)
    _ask(client, engines, names)
    return (_memory(engines, fresh) - before) / (held * maker.bytes)


def drop(paths: Sequence[Path]) -> None:
    """Drop written files from the page cache; `RuntimeError` where their pages stay in memory."""
    if in_memory := [path for path in paths if filesystem(path) in ("tmpfs", "ramfs")]:
        raise RuntimeError(
            f"{in_memory[0]} is on {filesystem(in_memory[0])}, which is memory, so "
            "density shows nothing there. Give --out a folder on a disk."
        )
    _made.drop_cache(list(paths))
    left, size = cached_bytes(paths), sum(path.stat().st_size for path in paths)
    if left > LEFT * size:
        raise RuntimeError(f"{left} of {size} bytes stayed in the page cache, so density shows nothing.")


def filesystem(path: Path) -> str:
    """Return the kind of file system that a file is on, as Linux calls it."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mounted, _, kind = line.partition(" - ")
        if mounted.split()[2] == wanted:
            return kind.split()[0]
    return "unknown"


def _memory(engines: Sequence[_served.Live], files: Sequence[Path]) -> int:
    pids = [process.pid for engine in engines for process in engine.processes()]
    return own_bytes(pids) + cached_bytes(files)


def _ask(client: Client, engines: Sequence[_served.Live], names: Sequence[str]) -> None:
    for engine in engines:
        answers = client.ask(engine.server, [Ask(0.0, name, PROMPT, 1) for name in names], under_way=1)
        if wrong := [answer for answer in answers if not answer.is_right]:
            raise RuntimeError(f"{len(wrong)} adapters were not served: {wrong[0].fault}")
