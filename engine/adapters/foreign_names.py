"""What the names of tensors mean that no module of a base here can take, and what to do about them."""

import re
from collections.abc import Mapping

# The first that is found in a name is said.
REASONS: Mapping[str, str] = {
    r"(^|\.)(lm_head|embed_tokens)\.|lora_embedding_": (
        "the engine applies LoRA to the layers' projections alone. Train without lm_head and embed_tokens in "
        "target_modules and modules_to_save"
    ),
    r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.": (
        "it was saved from a model that a compiler or a distributed trainer had wrapped, and peft does not "
        "read it either. Save it again with save_pretrained of the unwrapped model"
    ),
    r"(^|\.)(vision_tower|vision_model|visual|language_model|multi_modal_projector|audio_tower)\.": (
        "it is of a multimodal model, and the base is a language model alone. Train on this base"
    ),
    r"\.bias$|lora_bias": "it is a bias, which the engine does not add. Train with bias='none', no lora_bias",
    r"\.lora_magnitude_vector": "it is of DoRA, which the engine does not compute. Train without use_dora",
    r"\.lora_(down|up)\.|\.alpha$": "it is in the form of kohya's scripts. Convert it to peft's form",
    r"\.lora_[ab]$": "it is in MLX's form. Transpose it and name it lora_A.weight or lora_B.weight",
    r"\.(hada|lokr|oft|vera|ia3|boft)_": "it is of another method than LoRA. Train with peft's LoraConfig",
    r"(^|\.)(score|classifier|v_head)\.": (
        "it is a head for scores, which the engine does not compute. Train a causal language model"
    ),
}


def reason_of(name: str) -> str:
    """Return why a tensor of this name cannot be served, without a full stop; empty for an unknown name."""
    return next((reason for part, reason in REASONS.items() if re.search(part, name)), "")
