"""A loss of your own: REINFORCE, without ratio and clip.

    python examples/custom_loss.py

The trainer imports the function that a policy's `loss` names. It is called for each microbatch and returns
one term for each token; the mean over all tokens is the loss.
"""

import subprocess
import sys


def reinforce(tokens, options):
    """Return -advantage * log-probability for each token (T).

    `tokens` has `new_T` and `old_T`, log-probabilities in trainer and engine, and `advantage_T`; `options` is
    `loss_config.options` of the policy.
    """
    return -tokens.advantage_T * tokens.new_T


def graftwork(*arguments: str) -> None:
    """Run a command of graftwork; raise if it fails."""
    subprocess.run([sys.executable, "-m", "flows.cli", *arguments], check=True)


if __name__ == "__main__":
    graftwork(
        "policy", "create", "adder-reinforce", "--data", "examples/sums.jsonl", "--verifier", "numeric",
        "--loss", "python:examples.custom_loss:reinforce", "--steps", "3",
    )  # fmt: skip
    graftwork("adapt", "adder-reinforce")
