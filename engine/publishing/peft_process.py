"""Compute log-probabilities with peft alone, on a copy of the base of this process's own.

    python -m engine.publishing.peft_process PARENT BASE ADAPTER DTYPE < ROWS

PARENT is the process to end with. The rows of token ids, as JSON, are read once base and adapter are loaded;
the answer goes to stdout. No line of Graftwork reads the adapter here.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from engine.lean_imports import lean_imports
from engine.process_reaper import die_with_parent


def opened(base: str, adapter: str, dtype: str) -> tuple[Any, list[str]]:
    """Return peft's model of an adapter's directory, and the tensors of it that peft does not use."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype), local_files_only=True)
    model = PeftModel.from_pretrained(plain, adapter, torch_device="cpu").eval()
    # Loaded again, because only this call returns what was left over.
    return model, list(model.load_adapter(adapter, "default", torch_device="cpu").unexpected_keys)


def logprobs(model: Any, rows: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the log-probability of each token but the first of each row."""
    import torch

    logprobs_of_rows = []
    with torch.inference_mode():
        for row in rows:
            tokens = torch.tensor([row])
            scores = model(tokens).logits[0, :-1].float().log_softmax(-1)
            logprobs_of_rows.append(scores.gather(1, tokens[0, 1:, None])[:, 0].tolist())
    return logprobs_of_rows


def main() -> None:
    """Answer one question on stdin; whatever libraries print goes to stderr."""
    parent, base, adapter, dtype = sys.argv[1:]
    die_with_parent(int(parent))
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with lean_imports():
        model, unused = opened(base, adapter, dtype)
    rows = json.load(sys.stdin)
    with answer:
        json.dump({"rows": logprobs(model, rows), "unused": unused[:3]}, answer)


if __name__ == "__main__":
    main()
