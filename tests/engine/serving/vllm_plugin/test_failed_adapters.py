"""A loss of bytes on one of two tensor-parallel ranks, in two processes over gloo, without an engine."""

import json
import multiprocessing
import os
import subprocess
import sys
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed import parallel_state

from engine.adapters import packed
from engine.serving.vllm_plugin.failed_adapters import FAILED, mark_failed
from engine.serving.worker import loader
from engine.serving.worker.host_tier_bytes import HostTierBytes
from engine.store.segments import PAGE_ALIGNED_FROM, Store
from tests.helpers import vllm_layers as made
from tests.helpers.repository import ROOT

NAMES = ("p@good", "p@lost", "p@other", "p@gone")


def merged(slots: int):
    return made.merged(4096, [2048, 2048], made.lora_config(slots, 64, torch.float32))


def addresses(root: Path) -> dict[str, dict]:
    """Store an adapter for each name, in a store of its own."""
    found = {}
    for seed, name in enumerate(NAMES):
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            "model.up_proj.lora_A": torch.randn(64, 4096, generator=generator),
            "model.up_proj.lora_B": torch.randn(2048, 64, generator=generator),
        }
        whole = packed.pack(tensors, torch.float32, {"gate_up_proj": ("gate_proj", "up_proj")})
        assert whole.layout.nbytes > PAGE_ALIGNED_FROM
        store = Store(root / str(seed))
        at = store.append(whole.tobytes())
        found[name] = {
            "path": str(store.path(at.segment)), "offset": at.offset, "length": at.length,
            "checksum": at.checksum, "layout": whole.layout.to_json(),
        }  # fmt: skip
    return found


def serve(rank: int, root: Path) -> None:
    """Be one rank: activate by steps, with the bytes of one adapter cut short on rank 1 alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{root / 'meeting'}", rank=rank, world_size=2
    )
    parallel_state._TP = SimpleNamespace(world_size=2, cpu_group=torch.distributed.group.WORLD)
    worker = loader.PackedWorkerManager.__new__(loader.PackedWorkerManager)
    config = made.lora_config(2, 64, torch.float32)
    worker._adapter_manager = made.manager(loader.SlotManager, {"model.gate_up_proj": merged(2)}, config)
    worker.host = HostTierBytes(worker.slots.buffers)
    for name, address in addresses(root / str(rank)).items():
        worker.host.adapters[name] = worker.host.open(name, address)
        if rank == 1 and name in ("p@lost", "p@gone"):
            os.truncate(address["path"], address["offset"] + 4096)
    # A mapped one is known to be lost before its slot is touched, a read one within.
    gone = worker.host.adapters["p@gone"]
    mapped = copy(gone.plan)
    mapped.can_read = False
    worker.host.adapters["p@gone"] = replace(gone, plan=mapped)
    said: list[str] = []
    loader.log.addFilter(lambda record: said.append(record.getMessage()) or True)
    steps = []
    for ids in ((1, 2), (3, 1), (4, 3), (1, 3)):
        # A set of requests has another order in every process.
        ordered = ids if rank else ids[::-1]
        requests: Any = [SimpleNamespace(lora_int_id=i, lora_name=NAMES[i - 1]) for i in ordered]
        worker.set_active_adapters(requests, None)
        steps.append(sorted(filter(None, worker.slots.lora_index_to_id)))
    result = {"steps": steps, "lost": list(worker.slots.failed), "said": said}
    (root / f"{rank}.json").write_text(json.dumps(result))


def serve_both(root: Path) -> None:
    """Be both ranks: forks, so that vLLM is imported once."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=serve, args=(rank, root)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit([rank.exitcode for rank in ranks] != [0, 0])


@pytest.mark.parametrize("attribute", ["_model_runner_output", "model_runner_output", None])
def test_both_of_vllms_model_runners_tell_who_ran_without_an_adapter(attribute: str | None) -> None:
    """The second one, which vLLM takes on a GPU, has no mapping of its batch, and another wrapper."""
    told = SimpleNamespace(req_ids=["a", "b", "c"])
    runner = SimpleNamespace(lora_manager=SimpleNamespace(slots=SimpleNamespace(failed={7: "p@lost"})))
    if attribute == "_model_runner_output":
        runner.input_batch = SimpleNamespace(req_ids=told.req_ids, request_lora_mapping=[0, 7, 3])
    else:
        # Requests that are not in this step are under way, too.
        adapters = {"b": 7, "c": 3, "d": 7}
        requests = {name: SimpleNamespace(lora_int_id=number) for name, number in adapters.items()}
        runner.lora_state = SimpleNamespace(lora_requests=requests)
    output = SimpleNamespace(**{attribute: told}) if attribute else told
    assert mark_failed(runner, output) is output
    assert getattr(told, FAILED) == ["b"]


@pytest.mark.services
def test_what_one_rank_loses_is_lost_on_both(tmp_path):
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for result in (first, second):
        # The third step makes room for an adapter that is lost.
        assert result["steps"] == [[1], [1, 3], [3], [1, 3]]
        assert result["lost"] == [2, 4]
        assert ["p@lost" in said for said in result["said"]] == [True, False]
    assert "another rank" in first["said"][0]
    assert "4096 of 1572864" in second["said"][0]


if __name__ == "__main__":
    serve_both(Path(sys.argv[1]))
