"""Adapters made cheaply for load: one random template, whose signs each number draws anew.

So every one is different, its values are distributed as the template's, and a million cost seconds. A digest
here is that of the packed bytes and their layout: it names the content as well, and takes no parse of
37,000 tensors.
"""

import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from engine.adapters import packed
from engine.adapters.layouts import PLAIN
from engine.base.families import BaseShapes
from engine.base.resident import BaseInfo, base_config
from engine.catalog.catalog import Policy, Revision
from engine.catalog.opening import whole_catalog
from engine.catalog.records import served_name
from engine.settings.params import Params
from engine.store.open import open_store
from engine.store.segments import Location
from tests.helpers.layout_writer import from_canonical

# Of adapters that are appended and committed together.
BATCH_BYTES = 64 << 20
WORDS = {2: np.uint16, 4: np.uint32}
FUSED = "peft-fused"


def template(
    shapes: BaseShapes, rank: int, dtype: torch.dtype, leaves: tuple[str, ...] | None = None
) -> dict[str, torch.Tensor]:
    """Return random canonical tensors on all modules, or on those whose last names are in `leaves`.

    gate and up have one A, so that PEFT's fused layout holds them at the same rank.
    """
    generator = torch.Generator().manual_seed(rank)
    found: dict[str, torch.Tensor] = {}
    for module, (inputs, outputs) in shapes.modules().items():
        if leaves is None or module.rpartition(".")[2] in leaves:
            a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            # So large, at any rank, that greedy tokens of a trained base differ from adapter to adapter.
            b = torch.randn(outputs, rank, generator=generator) * 0.85 / rank**0.5
            one = found.get(f"{module.replace('up_proj', 'gate_proj')}.lora_A")
            found[f"{module}.lora_A"] = a.to(dtype) if one is None else one.clone()
            found[f"{module}.lora_B"] = b.to(dtype)
    return found


def adapter_bytes(given: Params, base: str, rank: int, dtype: torch.dtype) -> int:
    """Return the packed bytes of one adapter on all modules of a base."""
    shapes = BaseShapes.of(base_config(given.base.model_copy(update={"name": base}), given.paths))
    return packed.pack(template(shapes, rank, dtype), dtype, shapes.fused).layout.nbytes


def with_signs(payload: np.ndarray, itemsize: int, number: int) -> np.ndarray:
    """Return a payload of floats of `itemsize` bytes with the signs that `number` draws."""
    words = payload.view(WORDS[itemsize])
    drawn = np.random.default_rng(number).bytes(-(-len(words) // 8))
    signs = np.unpackbits(np.frombuffer(drawn, np.uint8), count=len(words)).astype(words.dtype)
    flipped: np.ndarray = words ^ (signs << np.array(8 * itemsize - 1, words.dtype))
    return flipped.view(np.uint8)


class Maker:
    """Publishes fresh adapters of one shape; numbers never repeat, so neither do digests."""

    def __init__(
        self, params: Params, base: BaseInfo, policy: str, rank: int, dtype: torch.dtype,
        leaves: tuple[str, ...] | None = None, first: int = 0,
    ):  # fmt: skip
        """`first` is the first number: adapters with other numbers have other bytes."""
        shapes = BaseShapes.read(base.path)
        whole = packed.pack(template(shapes, rank, dtype, leaves), dtype, shapes.fused)
        self.bytes = whole.layout.nbytes
        self._params, self._base, self._policy, self._rank = params, base, policy, rank
        self._layout, self._payload = whole.layout, whole.payload.numpy()
        self._numbers = itertools.count(first)
        self.segments: list[Path] = []
        self.newest: list[Path] = []
        self._catalog = whole_catalog(params.paths.catalog_url)
        self._catalog.policies.add(Policy(policy, base.digest, {}, "bench", time.time()))
        self._catalog.layouts.add(self._layout.digest, self._layout.to_json())

    def make(self, count: int) -> list[str]:
        """Append so many fresh adapters, then commit their rows; return their served names.

        `newest` are then the segments that hold them.
        """
        names: list[str] = []
        self.newest = []
        store = open_store(self._params)
        for batch in self._batches(count):
            payloads = [with_signs(self._payload, self._layout.dtype.itemsize, n).data for n in batch]
            places = store.append_many(payloads)
            rows = [self._row(at) for at in places]
            if not all(self._catalog.revisions.add_many(rows)):
                raise RuntimeError("An adapter that should be fresh was known already.")
            names += [served_name(self._policy, row.digest) for row in rows]
            files = dict.fromkeys(self._params.paths.store / at.segment for at in places)
            self.segments += [path for path in files if path not in self.segments]
            self.newest += [path for path in files if path not in self.newest]
        store.close()
        return names

    def _row(self, at: Location) -> Revision:
        return Revision(
            **at._asdict(),
            state="exported",
            policy=self._policy,
            digest=self._digest(at.checksum),
            base=self._base.digest,
            parent=None,
            step=0,
            rank=self._rank,
            bytes=at.length,
            layout=self._layout.digest,
            owner="bench",
            created_at=time.time(),
        )

    def _batches(self, count: int) -> Iterator[list[int]]:
        each = max(1, BATCH_BYTES // self.bytes)
        for first in range(0, count, each):
            yield [next(self._numbers) for _ in range(min(each, count - first))]

    def _digest(self, checksum: str) -> str:
        return hashlib.sha256(f"{self._base.digest}\0{self._layout.digest}\0{checksum}".encode()).hexdigest()

    def remove(self, segments: list[Path]) -> None:
        """Remove segments whose adapters are not asked for again; what is mapped of them stays mapped."""
        for path in segments:
            path.unlink()
        self.segments = [path for path in self.segments if path not in segments]

    def close(self) -> None:
        self._catalog.close()


class PeftMaker:
    """The same for vLLM's own loader: directories as peft writes them, `root/NAME`."""

    def __init__(self, root: Path, base: BaseInfo, rank: int, dtype: torch.dtype):
        from safetensors.torch import save

        shapes = BaseShapes.read(base.path)
        layout = FUSED if shapes.experts else PLAIN
        tensors, config = from_canonical(template(shapes, rank, dtype), layout, shapes)
        # vLLM's resolver compares it with the base's path.
        self._config = json.dumps(config | {"base_model_name_or_path": str(base.path)})
        file = np.frombuffer(save(tensors), np.uint8)
        self._start = 8 + int(file[:8].view(np.uint64)[0])
        self._file, self._itemsize, self.root = file, dtype.itemsize, root
        self._numbers = itertools.count()

    def make(self, count: int) -> list[str]:
        names = [f"a{next(self._numbers)}" for _ in range(count)]
        for name in names:
            folder = self.root / name
            folder.mkdir(parents=True)
            data = with_signs(self._file[self._start :].copy(), self._itemsize, int(name[1:]))
            (folder / "adapter_model.safetensors").write_bytes(
                self._file[: self._start].tobytes() + data.tobytes()
            )
            (folder / "adapter_config.json").write_text(self._config)
        os.sync()
        return names


def drop_cache(paths: list[Path]) -> None:
    """Drop written files from the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_from_disk(paths: list[Path]) -> float:
    """Drop files from the page cache and read each once; return the seconds of reading."""
    drop_cache(paths)
    began = time.monotonic()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass
    return time.monotonic() - began
