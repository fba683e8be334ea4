"""The training recipe that fits a base: settings of a policy that follow from the base's width.

A base narrower than `NARROWEST`, such as those that are built here, has no language to lose. Its recipe is
the defaults of `PolicyConfig`.
"""

from collections.abc import Mapping
from typing import Any

from engine.base.resident import base_config
from engine.settings.params import Params, Resolved, resolve_policy

# Width of the narrowest base that is taken for a language model.
NARROWEST = 256
# tinker-cookbook's RL loop trains Llama-3.1-8B, 4,096 wide, at 4e-5 with LoRA.
LR, WIDTH = 4e-5, 4096
# Runs below 100 steps take 15 times the rate of full fine-tuning, longer ones 10 times: "LoRA Without Regret"
# (Thinking Machines, 2025).
SHORT = 15 / 10
# Tinker's documentation fits the best rates of Llama models to the width with this exponent.
EXPONENT = 0.781
# With a fixed alpha, there 32, the best rate hardly depends on the rank ("LoRA Without Regret"). RL needs
# little capacity, so the default rank stands.
ALPHA = 32.0
# Of GRPO's paper, DeepSeekMath (arXiv 2402.03300, section 4.2).
KL = 0.04
# Adam's first steps have the size of the rate whatever the gradient, so they are the ones that are shortened.
WARMUP_STEPS = 3


def fitting_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a policy that fit the base with this `config.json`; none for a narrow one."""
    hidden = config["hidden_size"]
    if hidden < NARROWEST:
        return {}
    rate = LR * SHORT * (WIDTH / hidden) ** EXPONENT
    return {
        "lr": float(f"{rate:.1e}"),
        "alpha": ALPHA,
        "warmup_steps": WARMUP_STEPS,
        "loss_config": {"kl": KL},
        "collapse": "warn",
        "general": True,
    }


def fitted_policy(params: Params, name: str, changes: Mapping[str, Any] | None = None) -> Resolved:
    """Resolve a policy's settings as `resolve_policy` does, over those that fit the resident base.

    Raises its errors, and those of `base_config`.
    """
    return resolve_policy(params, name, changes, fitting_settings(base_config(params.base, params.paths)))
