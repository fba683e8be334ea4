"""What the fields of peft's `adapter_config.json` mean for serving, as of peft 0.21.

A field is harmless where no value of it changes what the saved factors mean, plain where it is unset.
Anything else is refused by name: a meaning that is ignored would pass every check of ours and still be wrong.
"""

from collections.abc import Mapping
from typing import Any

from engine.errors import AdapterError

UNSET: tuple[Any, ...] = (None, False, "", [], {})
# Read by the import, told by the tensors, or of training and bookkeeping alone.
HARMLESS = frozenset({
    "auto_mapping", "peft_version", "revision", "inference_mode", "runtime_config", "base_model_name_or_path",
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora",
    "target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern",
    "lora_dropout",
    # Of Conv1D layers, which no base here has: peft takes it back on linear ones.
    "fan_in_fan_out",
    # Each is read only where another field says so, and that one is refused.
    "megatron_core", "qalora_group_size", "ensure_weight_tying",
    # Settings of an initialization, which `init_lora_weights` names.
    "loftq_config", "eva_config", "corda_config", "lora_ga_config",
})  # fmt: skip
# The values with a plain meaning beside those of UNSET. An initialization that leaves the base's weights
# alone is over once the factors are saved.
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),
}
MERGE = (
    "Merge it into the base with peft's `merge_and_unload` and serve the result as a base, or train without."
)
REMEDIES: Mapping[str, str] = {
    "peft_type": "Only LoRA can be imported.",
    "task_type": "A base here is a causal language model. Train with task_type CAUSAL_LM.",
    "init_lora_weights": "This initialization changed the base's weights, so the factors belong to another "
    "base. Convert it with peft: save the adapter before training, and after it call "
    "`save_pretrained(..., path_initial_model_for_weight_conversion=THAT_DIRECTORY)`.",
    "alora_invocation_tokens": "An aLoRA is active only after its invocation tokens; an adapter that is "
    "served here is always on. Train without the field.",
    "bias": 'The engine adds no biases. Train with bias="none".',
    "lora_bias": "The engine adds no biases. Train without the field.",
    "use_dora": MERGE,
    "modules_to_save": "Whole modules are not served with an adapter. " + MERGE,
    "trainable_token_indices": "The engine serves the base's own embeddings. " + MERGE,
    "layer_replication": "The base has its layers once. " + MERGE,
    "use_qalora": "It pools the inputs of a quantized base. " + MERGE,
    "megatron_config": "Export the adapter in peft's own form.",
    **dict.fromkeys(
        ("velora_config", "monteclora_config", "use_bdlora", "arrow_config", "kasa_config"), MERGE
    ),
}
UNKNOWN = (
    "What the field changes is not known here. Train and save with a plain LoraConfig, or merge the adapter."
)


def refuse_unserved(where: str, values: Mapping[str, Any]) -> None:
    """Raise `AdapterError` for the first field that is neither harmless nor plain, with what to do."""
    for name, value in values.items():
        if name in HARMLESS or value in UNSET or value in PLAIN.get(name, ()):
            continue
        shown = name if name.isidentifier() else repr(name)
        raise AdapterError(f"{where} sets {shown[:80]} to {repr(value)[:80]}. {REMEDIES.get(name, UNKNOWN)}")
