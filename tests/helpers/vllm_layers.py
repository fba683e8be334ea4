"""vLLM's own LoRA layers and managers around bases without weights, for tests and benchmarks.

A base of true width does not fit in memory; what loads adapters is the LoRA layers' slot tensors and the
managers' code, and those are vLLM's, unchanged.
"""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import (
    ColumnParallelLinearWithLoRA,
    FusedMoE3DWithLoRA,
    FusedMoEWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import AdapterLRUCache, LoRAModelManager, LRUCacheLoRAModelManager
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

Layers = dict[str, Any]


def lora_config(slots: int, rank: int, dtype: torch.dtype, mixed: bool = False) -> LoRAConfig:
    config = LoRAConfig(
        max_loras=slots, max_lora_rank=rank, max_cpu_loras=1024, enable_mixed_moe_lora_format=mixed
    )
    config.lora_dtype = dtype
    return config


def _base(cls: type, tp: tuple[int, int], **fields: Any) -> Any:
    base = cls.__new__(cls)
    torch.nn.Module.__init__(base)
    base.weight = torch.empty(0)
    base.tp_rank, base.tp_size = tp
    for name, value in fields.items():
        setattr(base, name, value)
    return base


def _made(layer: Any, config: LoRAConfig) -> Any:
    layer.create_lora_weights(config.max_loras, config)
    return layer


def qkv(hidden: int, heads: int, kv_heads: int, head: int, config: LoRAConfig, tp=(0, 1)) -> Any:
    _, size = tp
    mine, replicas = max(1, kv_heads // size), max(1, size // kv_heads)
    base = _base(
        QKVParallelLinear, tp, input_size=hidden, total_num_heads=heads, total_num_kv_heads=kv_heads,
        head_size=head, num_heads=heads // size, num_kv_heads=mine, num_kv_head_replicas=replicas,
        output_sizes=[heads * head, mine * head * size, mine * head * size],
        output_size_per_partition=(heads // size + 2 * mine) * head,
    )  # fmt: skip
    return _made(MergedQKVParallelLinearWithLoRA(base), config)


def merged(inputs: int, outputs: list[int], config: LoRAConfig, tp=(0, 1)) -> Any:
    base = _base(
        MergedColumnParallelLinear, tp, input_size=inputs, output_sizes=outputs,
        output_size_per_partition=sum(outputs) // tp[1],
    )  # fmt: skip
    return _made(MergedColumnParallelLinearWithLoRA(base), config)


def column(inputs: int, outputs: int, config: LoRAConfig, tp=(0, 1)) -> Any:
    base = _base(
        ColumnParallelLinear, tp, input_size=inputs, output_size=outputs,
        output_size_per_partition=outputs // tp[1],
    )  # fmt: skip
    return _made(ColumnParallelLinearWithLoRA(base), config)


def row(inputs: int, outputs: int, config: LoRAConfig, tp=(0, 1)) -> Any:
    base = _base(
        RowParallelLinear, tp, input_size=inputs, input_size_per_partition=inputs // tp[1],
        output_size=outputs,
    )  # fmt: skip
    return _made(RowParallelLinearWithLoRA(base), config)


def replicated(inputs: int, outputs: int, config: LoRAConfig) -> Any:
    base = _base(ReplicatedLinear, (0, 1), input_size=inputs, output_size=outputs)
    return _made(ReplicatedLinearWithLoRA(base), config)


def experts(
    count: int, hidden: int, inner: int, config: LoRAConfig, tp=(0, 1), fused: bool = False
) -> FusedMoEWithLoRA:
    """Make the 2-D layer, or the 3-D one; their own constructors want a whole MoE runner."""
    cls = FusedMoE3DWithLoRA if fused else FusedMoEWithLoRA
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    parallel = SimpleNamespace(tp_rank=tp[0], tp_size=tp[1], use_ep=False, ep_rank=0)
    layer.moe_config = SimpleNamespace(
        hidden_dim=hidden, num_experts=count, num_local_experts=count,
        intermediate_size_per_partition=inner // tp[1], moe_parallel_config=parallel,
    )  # fmt: skip
    layer.tp_rank, layer.tp_size = tp
    layer.device, layer._w13_slices = torch.get_default_device(), 1 if fused else 2
    layer.enable_moe_shared_loras = False
    layer.create_lora_weights(
        config.max_loras, config, SimpleNamespace(architectures=["Qwen3MoeForCausalLM"])
    )
    return layer


def manager(
    cls: type[LRUCacheLoRAModelManager], layers: Layers, config: LoRAConfig, fused: bool = False
) -> Any:
    """A manager over these layers by their names; everything else of vLLM's constructor needs a model."""

    def init(self: Any, *_: Any) -> None:
        self.lora_config, self.modules = config, layers
        self._registered_adapters = AdapterLRUCache(self.capacity, self.deactivate_adapter)
        self._active_adapters = AdapterLRUCache(self.lora_slots, self._deactivate_adapter)
        self.lora_index_to_id = [None] * self.lora_slots
        self.is_pooling_model = self._is_non_gated_moe = self._enable_moe_shared_loras = False
        self._pooling_task = self._classification_head = self.moe_ep_load_spec = None
        self._enable_mixed_moe_lora_format = config.enable_mixed_moe_lora_format
        self._is_3d_moe_model, self._is_moe = fused, True
        self.model = SimpleNamespace(config=SimpleNamespace(architectures=["Qwen3MoeForCausalLM"]))
        self.packed_modules_mapping = {
            "qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"],
            "experts": _expert_names(layers),
        }  # fmt: skip
        self.supported_lora_modules = sorted({name.rpartition(".")[2] for name in layers})
        self.packed_modules = {}
        for name, layer in layers.items():
            if not (fused and isinstance(layer, FusedMoE3DWithLoRA)):
                self._register_packed_modules(name)

    with mock.patch.object(LoRAModelManager, "__init__", init):
        return cls()  # type: ignore[call-arg]


def _expert_names(layers: Mapping[str, Any]) -> list[str]:
    counts = [layer.local_num_experts for layer in layers.values() if isinstance(layer, FusedMoEWithLoRA)]
    # vLLM's order: w1, w2, w3 of each expert.
    leaves = ("gate_proj", "down_proj", "up_proj")
    return [f"experts.{i}.{leaf}" for i in range(max(counts, default=0)) for leaf in leaves]


class StockWorker(LRUCacheWorkerLoRAManager):
    """vLLM's own worker manager over `manager`: `add_adapter` reads, packs and activates."""

    def __init__(self, layers: Layers, config: LoRAConfig, fused: bool = False):
        self.lora_config, self.vocab_size, self.max_position_embeddings = config, 1024, None
        self._lora_model_cls = LoRAModel
        self._adapter_manager = manager(LRUCacheLoRAModelManager, layers, config, fused)

    def load(self, number: int, directory: Path, fused: bool) -> None:
        from vllm.lora.request import LoRARequest

        self.add_adapter(LoRARequest(f"a{number}", number, str(directory), is_3d_lora_weight=fused))
