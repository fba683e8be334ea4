"""A server with vLLM's own loader of adapters on a mixture of experts on a CPU, to be compared with ours.

    python tests/bench/_stock_moe.py FOLDER ARGUMENTS_OF_VLLM

Stock vLLM 0.32.0 has no MoE LoRA on a CPU. What it lacks is ours: operations, the class of experts,
and slots in our layout, under the names that vLLM's `set_lora` writes to. What loads an adapter is vLLM's:
the resolver's `add_lora` inside the step loop, its reading, its conversion and its copies.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from vllm.lora import utils
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.v1.worker import lora_model_runner_mixin

from engine.serving.vllm_plugin import plugin
from engine.serving.worker.moe_cpu import ExpertsWithLoRA
from engine.serving.worker.slots import slots_of

# By this name a worker imports the patches before it loads the model.
EXTENSION = "_stock_moe.Extension"


class Experts(ExpertsWithLoRA):
    """Our layer of experts, whose slots vLLM's `set_lora` fills."""

    def create_lora_weights(self, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        super().create_lora_weights(max_loras, lora_config, model_config)
        self.fully_sharded = self.enable_moe_shared_loras = False
        self.adapter_enabled = torch.zeros(max_loras + 1, dtype=torch.int)
        slices = range(self._w13_slices)
        self.w13_lora_a_stacked = tuple(self.gate_up.a_SEMRI[:, :, i] for i in slices)
        self.w13_lora_b_stacked = tuple(self.gate_up.b_SEMRO[:, :, i].transpose(2, 3) for i in slices)
        self.w2_lora_a_stacked = (self.down.a_SEMRI[:, :, 0],)
        self.w2_lora_b_stacked = (self.down.b_SEMRO[:, :, 0].transpose(2, 3),)


class Manager(LRUCacheLoRAModelManager):
    """vLLM's manager over slots that our operations read."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for name, module in self.modules.items():
            slots_of(name, module)

    def create_dummy_lora(self, lora_id: int, rank: int, embedding_modules: Any = None) -> LoRAModel:
        """Return the warm-up's adapter: it needs a slot and no factors."""
        return LoRAModel(lora_id, rank, {})


class WorkerManager(LRUCacheWorkerLoRAManager):
    """vLLM's, over `Manager`."""

    _manager_cls = Manager


class Extension:
    """Mixed into vLLM's worker; importing it installs the patches."""


class Folder(LoRAResolver):
    """vLLM's resolver of a folder of adapters, for PEFT's fused layout: its own cannot say that."""

    def __init__(self, root: Path):
        self._root = root

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        path = self._root / lora_name
        if not path.is_dir():
            return None
        return LoRARequest(lora_name, 1, str(path), is_3d_lora_weight=True)


def install() -> None:
    plugin.replace_cpu_operations()
    plugin.serve_experts_on_cpu()
    ours = (ExpertsWithLoRA, Experts)
    utils._all_lora_classes = (*(c for c in utils._all_lora_classes if c not in ours), Experts)
    lora_model_runner_mixin.LRUCacheWorkerLoRAManager = WorkerManager


def main() -> None:
    _, folder, *arguments = sys.argv
    from tests.helpers.stock_server import serve_like_ours

    LoRAResolverRegistry.register_resolver("folder", Folder(Path(folder)))
    serve_like_ours([*arguments, "--worker-extension-cls", EXTENSION])


if __name__ == "__main__":
    main()
elif __name__ == EXTENSION.partition(".")[0]:
    install()
