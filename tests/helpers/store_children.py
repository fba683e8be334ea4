"""Processes that work on one store in a loop and die at a given moment, forked by one that has imported all.

Reads lines `OPERATION SEED MOMENT VALUE` and answers each with the child's pid. `MOMENT` says how the
child ends itself: `call` before its VALUE-th call of a C function, `write` after VALUE bytes of what it
then writes, `never`. What a child has seen committed it notes in a file, a line `POLICY DIGEST`.
"""

import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from engine.adapters.revision import make_manifest, write_revision
from engine.base.families import BaseShapes
from engine.base.resident import BaseInfo, ensure_base
from engine.publishing.bulk import Entry, register_many
from engine.publishing.importing import import_revision
from engine.publishing.maintenance import compact, gc, verify
from engine.publishing.repacking import repack
from engine.settings.params import Params
from tests.helpers.made_adapters import canonical
from tests.helpers.stored import BASE, SHAPES, Stored, opened

POLICIES = ("north", "south", "east")
IMPORTED = "imported"
# So few that what one child publishes another has published already.
SEEDS = 60
LONG_AGO = 1.0
Note = Callable[[str, str], None]


def register(state: Stored, draw: random.Random, note: Note) -> None:
    seeds = draw.sample(range(SEEDS), draw.randint(1, 5))
    policy = draw.choice(POLICIES)
    entries = [Entry(policy, canonical(SHAPES, seed=seed, default=2), None, seed) for seed in seeds]
    for done in register_many(
        state.catalog, state.store, SHAPES, BASE, entries, "me", time.time(), torch.float32
    ):
        note(policy, done.digest)


def publish(state: Stored, draw: random.Random, note: Note) -> None:
    seed, policy = draw.randrange(SEEDS), draw.choice(POLICIES)
    kind = draw.random()
    if kind < 0.4:
        # Garbage before long, so that gc and compact have something to do.
        state.publish(policy, seed + SEEDS, expires_at=LONG_AGO)
    elif kind < 0.7:
        note(policy, state.publish_older(policy, seed + 2 * SEEDS).digest)
    else:
        note(policy, state.publish(policy, seed).digest)


def import_(state: Stored, draw: random.Random, note: Note) -> None:
    info: BaseInfo = ensure_base(state.params.base, state.params.paths)
    shapes = BaseShapes.read(info.path)
    some = dict.fromkeys(draw.sample(sorted(shapes.linear), 2), 1)
    tensors = canonical(shapes, ranks=some, default=0, seed=draw.randrange(SEEDS))
    targets = tuple(sorted({module.rpartition(".")[2] for module in some}))
    manifest = make_manifest(
        tensors, policy=IMPORTED, base_digest=info.digest, rank=1, targets=targets, step=0
    )
    folder = state.params.state_dir / "made" / str(os.getpid())
    folder.mkdir(parents=True, exist_ok=True)
    directory = write_revision(folder / manifest.digest, tensors, manifest, {})
    note(IMPORTED, import_revision(state.params, directory).digest)


def compact_(state: Stored, draw: random.Random, note: Note) -> None:
    report = compact(state.catalog, state.store, threshold=0.9, everything=draw.random() < 0.7)
    assert not report.examples, report.examples


def gc_(state: Stored, draw: random.Random, note: Note) -> None:
    state.catalog.lifecycle.expire(time.time())
    gc(state.catalog, state.store)


def repack_(state: Stored, draw: random.Random, note: Note) -> None:
    report = repack(state.catalog, state.store)
    assert not report.examples, report.examples


def verify_(state: Stored, draw: random.Random, note: Note) -> None:
    report = verify(state.catalog, state.store)
    assert not report.examples, report.examples


OPERATIONS = {
    "register": register,
    "import": import_,
    "compact": compact_,
    "gc": gc_,
    "repack": repack_,
    "publish": publish,
    "verify": verify_,
}


def die_before_call(number: int) -> None:
    left = number

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        left -= event == "c_call"
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(count)
    sys.setprofile(count)


def die_in_write(size: int) -> None:
    real = os.pwritev

    def cut(file: int, views: list[memoryview], at: int) -> int:
        left = size % (sum(map(len, views)) + 1)
        real(file, [b"".join(views)[:left]], at)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    os.pwritev = cut


def work(params: Params, operation: str, seed: int, moment: str, value: int) -> None:
    """Do an operation again and again, until the moment comes."""
    draw = random.Random(seed)
    notes = params.state_dir / "notes"
    file = os.open(notes / f"{os.getpid()}-{seed}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(policy: str, digest: str) -> None:
        os.write(file, f"{policy} {digest}\n".encode())

    with opened(params) as state:
        if moment == "call":
            die_before_call(value)
        elif moment == "write":
            die_in_write(value)
        while True:
            OPERATIONS[operation](state, draw, note)


def serve(params: Params) -> None:
    torch.set_num_threads(1)
    # Ended children leave the list of processes by themselves.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        operation, seed, moment, value = line.split()
        child = os.fork()
        if child:
            print(child, flush=True)
            continue
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            work(params, operation, int(seed), moment, int(value))
        except BaseException:
            fault = params.state_dir / "faults" / f"{operation}-{seed}-{moment}-{value}"
            fault.write_text(traceback.format_exc())
        finally:
            os._exit(1)


if __name__ == "__main__":
    state_dir, base = Path(sys.argv[1]), sys.argv[2]
    serve(Params(state_dir=state_dir, base={"name": base}))
