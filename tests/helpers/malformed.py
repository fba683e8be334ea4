"""A corpus of malformed adapters, each with the word that its refusal must say.

`CORPUS` maps a name to (what builds it in an empty directory for a base, the fault's words). All are
variations of a good adapter, which `good` writes; nothing here takes memory or time. The bases are small ones
of Qwen3-MoE with the experts of several layers, of which the first begins with `EXPERTS`.
"""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from engine.adapters.layouts import LAYOUTS
from engine.base.families import BaseShapes
from tests.helpers.made_adapters import canonical, save, shapes, write

BASE = shapes("qwen3_moe")
TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
EXPERTS = "base_model.model.model.layers.2.mlp.experts"
ROUTER = "base_model.model.model.layers.2.mlp.gate"
MODEL = "base_model.model.model"
QUERY = f"{MODEL}.layers.0.self_attn.q_proj"
# A tensor of the experts in each layout, and its A and B.
SAMPLE = {
    "per-expert": f"{EXPERTS}.1.down_proj",
    "peft-fused": EXPERTS,
    "megatron-stacked": EXPERTS,
    "megatron-3d": f"{EXPERTS}.down_proj",
    "shared-outer": f"{EXPERTS}.down_proj",
    "shared-outer-split": f"{EXPERTS}.w2",
}
Build = Callable[[Path, BaseShapes], None]
CORPUS: dict[str, tuple[Build, str]] = {}


def good(directory: Path, base: BaseShapes, layout: str = "per-expert") -> Path:
    return write(directory, canonical(base, share=True), layout, base)


def case(name: str, words: str) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        CORPUS[name] = (build, words)
        return build

    return add


def tensors_changed(change: Callable[[dict], None], layout: str = "per-expert") -> Build:
    def build(directory: Path, base: BaseShapes) -> None:
        good(directory, base, layout)
        tensors = load_file(directory / TENSORS)
        change(tensors)
        tensors = {name: value.contiguous().clone() for name, value in tensors.items()}
        save(directory, tensors, json.loads((directory / CONFIG).read_text()))

    return build


def bytes_changed(change: Callable[[bytes], bytes], layout: str = "per-expert") -> Build:
    def build(directory: Path, base: BaseShapes) -> None:
        path = good(directory, base, layout) / TENSORS
        path.write_bytes(change(path.read_bytes()))

    return build


def header_changed(change: Callable[[dict], None]) -> Build:
    def rewrite(data: bytes) -> bytes:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        change(header)
        return framed(json.dumps(header).encode(), data[8 + length :])

    return bytes_changed(rewrite)


def framed(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def config_changed(**values: object) -> Build:
    def build(directory: Path, base: BaseShapes) -> None:
        path = good(directory, base) / CONFIG
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return build


def every_layout() -> None:
    """Each layout truncated, renamed, transposed, halved, of a wrong rank, and of another base."""
    for layout in (layout.name for layout in LAYOUTS):
        name_A, name_B = (f"{SAMPLE[layout]}.lora_{side}.weight" for side in "AB")

        def renamed(tensors: dict, old: str = name_A) -> None:
            tensors[old.replace(".experts", ".expert")] = tensors.pop(old)

        def transposed(tensors: dict, name: str = name_A) -> None:
            tensors[name] = tensors[name].transpose(-1, -2)

        def less_rank(tensors: dict, name: str = name_B, whole: str = layout) -> None:
            axis = 1 if whole == "megatron-stacked" else -1
            tensors[name] = tensors[name].narrow(axis, 0, tensors[name].shape[axis] - 1)

        def no_half(tensors: dict, name: str = name_B) -> None:
            del tensors[name]

        def other_base(tensors: dict, name: str = name_A) -> None:
            tensors[name] = torch.cat([tensors[name], tensors[name]], dim=-1)

        def bad_value(tensors: dict, name: str = name_A) -> None:
            tensors[name].view(-1)[-1] = float("nan")

        CORPUS[f"{layout}: truncated"] = (bytes_changed(lambda data: data[:-7], layout), "truncated")
        CORPUS[f"{layout}: renamed"] = (tensors_changed(renamed, layout), "base does not have")
        CORPUS[f"{layout}: transposed"] = (tensors_changed(transposed, layout), "has the shape")
        CORPUS[f"{layout}: wrong rank"] = (tensors_changed(less_rank, layout), "has the shape")
        CORPUS[f"{layout}: unequal halves"] = (tensors_changed(no_half, layout), "other half")
        CORPUS[f"{layout}: wrong base"] = (tensors_changed(other_base, layout), "has the shape")
        CORPUS[f"{layout}: NaN"] = (tensors_changed(bad_value, layout), "NaN or Inf")


every_layout()


def swap(one: str, other: str) -> Callable[[dict], None]:
    def change(tensors: dict) -> None:
        for side in "AB":
            a, b = f"{one}.lora_{side}.weight", f"{other}.lora_{side}.weight"
            tensors[a], tensors[b] = tensors[b], tensors[a]

    return change


# Gate and up have the same shapes; what is swapped with down shows.
CORPUS |= {
    "per-expert: gate and down swapped": (
        tensors_changed(swap(f"{EXPERTS}.0.gate_proj", f"{EXPERTS}.0.down_proj")), "has the shape"
    ),
    "peft-fused: gate_up and down swapped": (
        tensors_changed(swap(f"{EXPERTS}.base_layer", EXPERTS), "peft-fused"), "has the shape"
    ),
    "megatron-stacked: gate_up and down swapped": (
        tensors_changed(swap(f"{EXPERTS}.base_layer", EXPERTS), "megatron-stacked"), "has the shape"
    ),
    "megatron-3d: gate_up and down swapped": (
        tensors_changed(swap(f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"), "megatron-3d"),
        "has the shape",
    ),
    "shared-outer-split: w1 and w2 swapped": (
        tensors_changed(swap(f"{EXPERTS}.w1", f"{EXPERTS}.w2"), "shared-outer-split"), "has the shape"
    ),
    "query and value swapped": (
        tensors_changed(swap(QUERY, QUERY.replace("q_proj", "v_proj"))), "has the shape"
    ),
    "no tensors": (tensors_changed(lambda t: t.clear()), "no tensors"),
    "an expert too many": (
        tensors_changed(lambda t: t.update(
            {name.replace(".1.", ".99."): value for name, value in t.items() if ".experts.1." in name}
        )), "base does not have"
    ),
    "a layer too many": (
        tensors_changed(lambda t: t.update(
            {name.replace("layers.0.", "layers.9."): value for name, value in t.items()}
        )), "base does not have"
    ),
    "Inf": (tensors_changed(lambda t: t[f"{QUERY}.lora_A.weight"].fill_(float("inf"))), "NaN or Inf"),
    "a bias": (tensors_changed(lambda t: t.update({f"{QUERY}.bias": torch.ones(12)})), "it is a bias"),
    "a full weight": (
        tensors_changed(lambda t: t.update({f"{QUERY}.weight": torch.ones(12, 8)})), "not a LoRA factor"
    ),
    "a magnitude of DoRA": (
        tensors_changed(lambda t: t.update({f"{QUERY}.lora_magnitude_vector": torch.ones(12)})),
        "it is of DoRA",
    ),
    "the router": (
        tensors_changed(lambda t: t.update(
            {f"{ROUTER}.lora_A.weight": torch.ones(2, 8), f"{ROUTER}.lora_B.weight": torch.ones(3, 2)}
        )), "base does not have"
    ),
    "whole numbers": (
        tensors_changed(
            lambda t: t.update({f"{QUERY}.lora_A.weight": torch.ones(2, 8, dtype=torch.int32)})
        ),
        "dtype I32",
    ),
    "one factor twice": (
        tensors_changed(lambda t: t.update({f"{QUERY}.lora_A": t[f"{QUERY}.lora_A.weight"]})),
        "same factor",
    ),
    "experts of four axes": (
        tensors_changed(lambda t: t.update({f"{EXPERTS}.lora_A.weight": torch.ones(1, 1, 1, 1)})),
        "never have 4 axes",
    ),
    "a factor of rank 0": (
        tensors_changed(lambda t: t.update(
            {f"{QUERY}.lora_A.weight": torch.ones(0, 8), f"{QUERY}.lora_B.weight": torch.ones(12, 0)}
        )), "needs (rank, "
    ),
    "0 bytes": (bytes_changed(lambda data: b""), "0 bytes"),
    "7 bytes": (bytes_changed(lambda data: data[:7]), "7 bytes"),
    "header cut": (bytes_changed(lambda data: data[:100]), "announces a header"),
    "header of 2^60": (bytes_changed(lambda data: b"\0" * 7 + b"\x10" + data[8:]), "announces a header"),
    "header of brackets": (bytes_changed(lambda data: framed(b"[" * 200_000)), "not JSON"),
    "header no object": (bytes_changed(lambda data: framed(b"[1, 2]")), "does not map"),
    "header not UTF-8": (bytes_changed(lambda data: framed(b"\xff\xfe{}")), "not JSON"),
    "header names one twice": (
        bytes_changed(lambda data: framed(b'{"a": {}, "a": {}}')), "twice"
    ),
    "a tail": (bytes_changed(lambda data: data + b"\0" * 8), "truncated or has a tail"),
    "a hole": (header_changed(lambda h: moved(h, 8)), "begins at byte"),
    "overlapping": (header_changed(lambda h: moved(h, -8)), "begins at byte"),
    "negative offsets": (header_changed(lambda h: first(h).update(data_offsets=[-8, 0])), "not describe"),
    "negative shape": (header_changed(lambda h: first(h).update(shape=[-1, -8])), "does not describe"),
    "no shape": (header_changed(lambda h: first(h).pop("shape")), "does not describe"),
    "shape of words": (header_changed(lambda h: first(h).update(shape="ab")), "does not describe"),
    "shape and bytes differ": (header_changed(lambda h: first(h).update(shape=[9, 9])), "needs 324 bytes"),
    "a name of a page": (header_changed(lambda h: h.update({"a" * 10_000: first(h)})), "no module has"),
    "a name that clears screens": (header_changed(lambda h: h.update({"\x1b[2J": {}})), "no module has"),
    "a name of nothing": (header_changed(lambda h: h.update({"": first(h)})), "no module has"),
    "a dtype that is a list": (header_changed(lambda h: first(h).update(dtype=["F32"])), "does not describe"),
    "a dtype of a page": (header_changed(lambda h: first(h).update(dtype="F" * 9999)), "the dtype FFFF"),
    "a number of 400 digits": (config_changed(lora_alpha=10**400), "lora_alpha"),
    "config no JSON": (lambda path, base: (good(path, base) / CONFIG).write_text("{"), "not JSON"),
    "config a list": (lambda path, base: (good(path, base) / CONFIG).write_text("[]"), "one object"),
    "config missing": (lambda path, base: (good(path, base) / CONFIG).unlink(), "has no adapter_config.json"),
    "config of another kind": (config_changed(peft_type="IA3"), "peft_type"),
    "config with DoRA": (config_changed(use_dora=True), "use_dora"),
    "config with a bias": (config_changed(bias="all"), "bias"),
    "config with whole modules": (config_changed(modules_to_save=["lm_head"]), "modules_to_save"),
    "config without rank": (config_changed(r=None), "sets r to None"),
    "config of rank 0": (config_changed(r=0), "sets r to 0"),
    "config of another rank": (config_changed(r=3), "scaling is unknown"),
    "alpha is NaN": (config_changed(lora_alpha=float("nan")), "lora_alpha"),
    "alpha is a word": (config_changed(lora_alpha="16"), "lora_alpha"),
    "a pattern that looks ahead": (config_changed(rank_pattern={"(?=a)b": 2}), "cannot be read"),
    "patterns of a list": (config_changed(alpha_pattern=[1]), "alpha_pattern"),
}  # fmt: skip


def first(header: dict) -> dict:
    return header[min(name for name in header if name != "__metadata__")]


def moved(header: dict, by: int) -> None:
    entry = max(
        (value for name, value in header.items() if name != "__metadata__"),
        key=lambda item: item["data_offsets"],
    )
    entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]


@case("mixed layouts", "mixes layouts")
def mixed(directory: Path, base: BaseShapes) -> None:
    good(directory / "fused", base, "peft-fused")
    good(directory, base)
    config = json.loads((directory / CONFIG).read_text())
    fused, plain = load_file(directory / "fused" / TENSORS), load_file(directory / TENSORS)
    first, *_, last = base.experts
    mixed = {name: value for name, value in fused.items() if first in name}
    save(directory, mixed | {name: value for name, value in plain.items() if last in name}, config)


@case("a wrong number of experts", "has the shape")
def other_count(directory: Path, base: BaseShapes) -> None:
    def change(t: dict) -> None:
        t |= {name: torch.cat([value, value[:1]]) for name, value in t.items() if value.ndim == 3}

    tensors_changed(change, "megatron-3d")(directory, base)


@case("a pickle", "is not opened")
def pickled(directory: Path, base: BaseShapes) -> None:
    path = good(directory, base) / TENSORS
    torch.save(load_file(path), directory / "adapter_model.bin")
    path.unlink()


@case("a pickle under the name of safetensors", "is a pickle")
def disguised(directory: Path, base: BaseShapes) -> None:
    torch.save({"a": torch.ones(2, 8)}, good(directory, base) / TENSORS)


@case("an old pickle under the name of safetensors", "is a pickle")
def disguised_old(directory: Path, base: BaseShapes) -> None:
    torch.save({"a": torch.ones(2, 8)}, good(directory, base) / TENSORS, _use_new_zipfile_serialization=False)


@case("a symlink out of the directory", "link out of its directory")
def linked(directory: Path, base: BaseShapes) -> None:
    path = good(directory, base) / TENSORS
    target = directory.parent / f"{directory.name}-outside"
    os.replace(path, target)
    path.symlink_to(target)


@case("a config linked to the machine's files", "link out of its directory")
def linked_config(directory: Path, base: BaseShapes) -> None:
    path = good(directory, base) / CONFIG
    path.unlink()
    path.symlink_to("/etc/passwd")


@case("a dangling symlink", "has no adapter_model.safetensors")
def dangling(directory: Path, base: BaseShapes) -> None:
    path = good(directory, base) / TENSORS
    path.unlink()
    path.symlink_to("nowhere")


@case("a named pipe", "not a regular file")
def piped(directory: Path, base: BaseShapes) -> None:
    path = good(directory, base) / TENSORS
    path.unlink()
    os.mkfifo(path)


@case("a directory under the file's name", "not a regular file")
def folder(directory: Path, base: BaseShapes) -> None:
    path = good(directory, base) / TENSORS
    path.unlink()
    path.mkdir()


def giant(directory: Path, base: BaseShapes, entries: dict, size: int) -> None:
    """Write a header that announces `size` bytes of tensors, over a file of as many that takes no space."""
    path = good(directory, base) / TENSORS
    with path.open("wb") as file:
        file.write(framed(json.dumps(entries).encode()))
        file.truncate(file.tell() + size)


@case("a sparse giant of a wrong shape", "has the shape")
def sparse(directory: Path, base: BaseShapes) -> None:
    size = 1 << 40
    entry = {"dtype": "F32", "shape": [2, size // 8], "data_offsets": [0, size]}
    half = {"dtype": "F32", "shape": [12, 2], "data_offsets": [size, size + 96]}
    giant(directory, base, {f"{QUERY}.lora_A.weight": entry, f"{QUERY}.lora_B.weight": half}, size + 96)


@case("a sparse giant of a giant rank", "has the rank")
def sparse_rank(directory: Path, base: BaseShapes) -> None:
    rank, (size_in, size_out) = 1 << 30, base.linear["model.layers.0.self_attn.q_proj"]
    a, b = size_in * 4 * rank, size_out * 4 * rank
    entries = {
        f"{QUERY}.lora_A.weight": {"dtype": "F32", "shape": [rank, size_in], "data_offsets": [0, a]},
        f"{QUERY}.lora_B.weight": {"dtype": "F32", "shape": [size_out, rank], "data_offsets": [a, a + b]},
    }
    giant(directory, base, entries, a + b)
    path = directory / CONFIG
    path.write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


@case("a huge header", "announces a header")
def huge_header(directory: Path, base: BaseShapes) -> None:
    with (good(directory, base) / TENSORS).open("wb") as file:
        file.write(struct.pack("<Q", 10 << 30))
        file.truncate(11 << 30)


@case("a huge config", "may have at most")
def huge_config(directory: Path, base: BaseShapes) -> None:
    with (good(directory, base) / CONFIG).open("ab") as file:
        file.truncate(1 << 40)
