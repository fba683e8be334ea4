"""Import an adapter that was trained with peft.

    python examples/import_peft.py

It becomes a revision of the policy `from-peft`, which can be scored, released and pinned like any other.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from engine.base.resident import ensure_base
from engine.settings.params import load_params

logging.disable_progress_bar()
# The base that your services hold.
settings = load_params(os.environ.get("GRAFTWORK_PARAMS", "params.yaml"))
base = ensure_base(settings.base, settings.paths).path
tokenizer = AutoTokenizer.from_pretrained(base)
torch.manual_seed(0)
config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)

# Any training of yours; here a few steps on question and answer.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for line in Path("examples/sums.jsonl").read_text().splitlines()[:20]:
    row = json.loads(line)
    tokens = tokenizer(f"{row['question']} {row['answer']}", return_tensors="pt").input_ids
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

with TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    command = [sys.executable, "-m", "flows.cli", "adapters", "import", folder, "--policy", "from-peft"]
    subprocess.run(command, check=True)
