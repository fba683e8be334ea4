"""Read a packed file as any tool would: by safetensors, which refuses one that is not whole."""

from pathlib import Path

import torch
from safetensors import safe_open

from engine.adapters.packed import Packed, PackedLayout


def read_packed(path: Path) -> Packed:
    with safe_open(path, "pt") as file:
        layout = PackedLayout.from_json(file.metadata()["layout"])
    payload = bytearray(path.read_bytes()[-layout.nbytes :])
    return Packed(layout, torch.frombuffer(payload, dtype=torch.uint8))
