"""Small bases' configs, random canonical adapters for them, and their files in any layout."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.base.families import BaseShapes
from tests.helpers.layout_writer import from_canonical

ATTENTION = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6}
LATENT = {
    "hidden_size": 8, "num_attention_heads": 2, "kv_lora_rank": 5, "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 3, "v_head_dim": 4, "q_lora_rank": None,
}  # fmt: skip
MOE = {"num_hidden_layers": 3, "intermediate_size": 10, "moe_intermediate_size": 7}
SPARSE = {**MOE, "n_routed_experts": 3, "n_shared_experts": 2, "first_k_dense_replace": 1}
# hidden, inner, twice inner, E * R and the attention's widths all differ, so that every transposition shows.
CONFIGS = {
    "qwen3": {**ATTENTION, "num_hidden_layers": 2, "intermediate_size": 10},
    "qwen3_moe": {**ATTENTION, **MOE, "num_experts": 3, "mlp_only_layers": [1]},
    "deepseek_v3": {**LATENT, **SPARSE},
    "glm4_moe": {**ATTENTION, **SPARSE},
    "gpt_oss": {**ATTENTION, "num_hidden_layers": 2, "intermediate_size": 6, "num_local_experts": 3},
    "mixtral": {**ATTENTION, "num_hidden_layers": 2, "intermediate_size": 6, "num_local_experts": 3},
}


def shapes(model_type: str) -> BaseShapes:
    return BaseShapes.of({"model_type": model_type, **CONFIGS[model_type]})


def canonical(
    base: BaseShapes, *, ranks=None, default=2, share=False, one_A=False, seed=0, dtype=torch.float32
):
    """Make random canonical tensors on all modules; `ranks` maps a layer's path and projection to a rank.

    `share`: the factor next to the hidden state is one for all experts. `one_A`: gate and up have one A.
    A module of rank 0 has none.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (size_in, size_out) in base.modules().items():
        group = module.rsplit(".", 2)[0] + "." + module.rpartition(".")[2] if is_routed(module) else module
        rank = (ranks or {}).get(group, default)
        if rank:
            tensors[f"{module}.lora_A"] = torch.randn(rank, size_in, generator=generator).to(dtype)
            tensors[f"{module}.lora_B"] = torch.randn(size_out, rank, generator=generator).to(dtype)
    for key in sorted(tensors):
        parent, _, rest = key.partition(".experts.")
        leaf = rest.partition(".")[2]
        outer = leaf in ("gate_proj.lora_A", "up_proj.lora_A", "down_proj.lora_B")
        if share and outer:
            tensors[key] = tensors[f"{parent}.experts.0.{leaf}"].clone()
        if one_A and leaf == "up_proj.lora_A":
            tensors[key] = tensors[key.replace("up_proj", "gate_proj")].clone()
    return tensors


def is_routed(module: str) -> bool:
    return ".experts." in module


def groups(base: BaseShapes) -> list[str]:
    """Return what may have a rank of its own in every layout: gate and up of experts go together."""
    routed = [f"{parent}.{name}" for parent in base.experts for name in ("gate_up_proj", "down_proj")]
    return [*base.linear, *routed]


def spread(ranks: dict[str, int]) -> dict[str, int]:
    """Turn the ranks of `groups` into those that `canonical` takes."""
    out = {}
    for group, rank in ranks.items():
        parent = group.removesuffix(".gate_up_proj")
        out |= {f"{parent}.gate_proj": rank, f"{parent}.up_proj": rank} if parent != group else {group: rank}
    return out


def save(directory: Path, tensors: dict[str, torch.Tensor], config: dict) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def write(
    directory: Path, tensors: dict[str, torch.Tensor], layout: str, base: BaseShapes, scale=1.0
) -> Path:
    """Save canonical tensors in a layout; `scale`, a power of two, moves from B into alpha."""
    file, config = from_canonical(tensors, layout, base)
    file = {name: value / scale if ".lora_B" in name else value for name, value in file.items()}
    config["lora_alpha"] *= scale
    config["alpha_pattern"] = {name: rank * scale for name, rank in config["rank_pattern"].items()}
    return save(directory, file, config)
