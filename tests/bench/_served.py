"""Live engines for benchmarks under load: ours as `graftwork up` starts it, and vLLM's own beside it."""

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil
import torch
from _traffic import Server

from engine.base.families import BaseShapes
from engine.base.resident import BaseInfo, ensure_base
from engine.catalog.opening import whole_catalog
from engine.services import lifecycle as services
from engine.serving.server import lora_targets
from engine.settings.params import Params
from tests.helpers.live import StockServer, free_port, start_reaped, stop_reaped

START_S = 900


@dataclass(frozen=True)
class Shape:
    """How a base is served here: dtype, and the rank of its adapters."""

    dtype: str
    rank: int

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


SHAPES = {
    "tiny-dense": Shape("float32", 8), "many-moe": Shape("bfloat16", 1), "smollm2-135m": Shape("float32", 8),
}  # fmt: skip


@dataclass(frozen=True)
class Live:
    """One running engine of ours."""

    params: Params
    base: BaseInfo
    server: Server
    roots: tuple[int, ...]

    def processes(self) -> list[psutil.Process]:
        """Return the engine's processes: the API server, the engine core and whatever they started."""
        found = [psutil.Process(pid) for pid in self.roots]
        return [*found, *(child for root in found for child in root.children(recursive=True))]


@contextmanager
def live(
    given: Params, base: str, beside: Path, sections: Mapping[str, Any] = MappingProxyType({}), **engine: Any
) -> Iterator[Live]:
    """Start an engine on the bases that `given` has built, with a state directory of its own in `beside`.

    `sections` are settings of other services.
    """
    shape = SHAPES[base]
    with tempfile.TemporaryDirectory(prefix="bench-", dir=beside) as root:
        given.paths.bases.mkdir(parents=True, exist_ok=True)
        (Path(root) / "bases").symlink_to(given.paths.bases)
        fields = {
            "port": free_port(), "dtype": shape.dtype, "max_rank": shape.rank, "start_timeout_s": START_S,
            **engine,
        }  # fmt: skip
        params = Params.model_validate(
            {"state_dir": root, "base": {"name": base}, "engine": fields, **sections}
        )
        os.environ.update(services.environment(params))
        built: list[BaseInfo] = []

        def build() -> None:
            built.append(ensure_base(params.base, params.paths))

        with services.session(params, build, told, ("engine",)):
            catalog = whole_catalog(params.paths.catalog_url)
            key = catalog.keys.ensure_local(params.paths.local_key)
            catalog.close()
            roots = tuple(state.pid for state in services.status(params) if state.pid)
            yield Live(params, built[0], Server(params.url("engine"), key), roots)


@contextmanager
def second(first: Live) -> Iterator[Live]:
    """Start one more engine on the same catalog and store."""
    port = free_port()
    engine = first.params.engine.model_copy(update={"port": port})
    params = first.params.model_copy(update={"engine": engine})
    file = params.paths.root / "second.json"
    file.write_text(json.dumps(params.model_dump(mode="json")))
    with (params.paths.logs / "second.log").open("wb") as log:
        process = start_reaped(["-m", "engine.serving.server", "--params", str(file)], log)
    try:
        url = params.url("engine")
        deadline = time.monotonic() + START_S
        while not _shows_marker(url):
            if process.poll() is not None or time.monotonic() > deadline:
                end = (params.paths.logs / "second.log").read_text(errors="replace")[-4000:]
                raise RuntimeError(f"The second engine did not start:\n{end}")
            time.sleep(0.5)
        yield Live(params, first.base, Server(url, first.server.key), (process.pid,))
    finally:
        stop_reaped(process)


def _shows_marker(url: str) -> bool:
    try:
        return httpx.get(f"{url}/graftwork/marker", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def stock(base: BaseInfo, shape: Shape, folder: Path, slots: int, cached: int) -> StockServer:
    """Return vLLM's own server over a folder of adapters in PEFT's form, which it loads when it is asked.

    For a mixture of experts it is vLLM's loader with our experts, so that the loader alone differs. There the
    adapters are in PEFT's fused form, the faster of the two that vLLM reads.
    """
    folder.mkdir(parents=True, exist_ok=True)
    more = [
        "--enable-lora", "--max-loras", str(slots), "--max-cpu-loras", str(cached), "--max-lora-rank",
        str(shape.rank), "--lora-target-modules", *lora_targets(base),
    ]  # fmt: skip
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    if not BaseShapes.read(base.path).experts:
        variables |= {
            "VLLM_PLUGINS": "lora_filesystem_resolver",
            "VLLM_LORA_RESOLVER_CACHE_DIR": str(folder),
        }
        return StockServer(base.path, shape.dtype, more=more, variables=variables)
    more.append("--enable-mixed-moe-lora-format")
    program = (str(Path(__file__).with_name("_stock_moe.py")), str(folder))
    return StockServer(base.path, shape.dtype, more=more, program=program, variables=variables)


def told(name: str, state: str) -> None:
    print(f"  {name:<12}{state}", flush=True)


def evictions(server: Server) -> int:
    """Return how many adapters have left the engine's host tier so far."""
    headers = {"authorization": f"Bearer {server.key}"}
    found = httpx.get(f"{server.url}/graftwork/residency", headers=headers, timeout=60)
    return int(found.raise_for_status().json()["evictions"])
