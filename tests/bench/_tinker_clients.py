"""A client of the Tinker API, in a process of its own: the SDK's calls of one job, and how long they took.

    python -P tests/bench/_tinker_clients.py JOB.json

Without -P its `import tinker` would find the benchmark of that name. The job's answer goes to JOB.done.json.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import tinker

from tests.helpers.tinker_job import Job, advantages, prompts_of


def steps(client: tinker.ServiceClient, job: Job) -> dict[str, Any]:
    """Train for the job's steps: sample, gather, step, and hand the weights to a new sampler."""
    made = client.create_lora_training_client(job.base, rank=job.rank, seed=job.seed)
    model = made.result()
    sampler = model.save_weights_and_get_sampling_client().result()
    seconds, losses, tokens = [], [], 0
    for step in range(job.steps):
        began = time.monotonic()
        prompts = prompts_of(job, step)
        asked = [
            sampler.sample(
                tinker.ModelInput.from_ints(prompt),
                job.group,
                tinker.SamplingParams(max_tokens=job.max_tokens, seed=job.seed_of(step, number), stop=[]),
            )
            for number, prompt in enumerate(prompts)
        ]
        data = []
        for prompt, future in zip(prompts, asked, strict=True):
            drawn = future.result().sequences
            given = advantages([list(one.tokens) for one in drawn])
            data += [datum(prompt, one, value) for one, value in zip(drawn, given, strict=True)]
        tokens += sum(one.model_input.length + 1 for one in data)
        gathered = model.forward_backward(data, "importance_sampling")
        stepped = model.optim_step(tinker.AdamParams(learning_rate=job.lr))
        losses.append(gathered.result().metrics["loss:sum"])
        stepped.result()
        sampler = model.save_weights_and_get_sampling_client().result()
        seconds.append(time.monotonic() - began)
    return {"seconds": seconds, "losses": losses, "tokens": tokens}


def datum(prompt: list[int], sample: Any, advantage: float) -> tinker.Datum:
    """Return a sample as the recipes of the cookbook send it."""
    tokens = list(sample.tokens)
    before, count = [0.0] * (len(prompt) - 1), len(prompt) + len(tokens) - 1
    columns = {
        "target_tokens": tinker.TensorData(data=[*prompt, *tokens][1:], dtype="int64", shape=[count]),
        "logprobs": tinker.TensorData(data=before + list(sample.logprobs), dtype="float32", shape=[count]),
        "advantages": tinker.TensorData(
            data=before + [advantage] * len(tokens), dtype="float32", shape=[count]
        ),
    }
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([*prompt, *tokens][:-1]), loss_fn_inputs=columns
    )


def singles(client: tinker.ServiceClient, job: Job) -> dict[str, Any]:
    """Ask for one sample of each of many prompts at once, by a call for each."""
    sampler = client.create_sampling_client(base_model=job.base).result()
    params = tinker.SamplingParams(max_tokens=job.max_tokens, stop=[])
    seconds = []
    for step in range(job.steps):
        prompts = [tinker.ModelInput.from_ints(prompt) for prompt in prompts_of(job, step)]
        began = time.monotonic()
        futures = [sampler.sample(prompt, 1, params) for prompt in prompts]
        drawn = [future.result().sequences[0] for future in futures]
        seconds.append(time.monotonic() - began)
        assert all(len(one.tokens) == job.max_tokens for one in drawn)
    return {"seconds": seconds}


def main() -> None:
    file = Path(sys.argv[1])
    job = Job(**json.loads(file.read_text()))
    with tinker.ServiceClient(base_url=job.url, api_key=job.key) as client:
        done = {"steps": steps, "singles": singles}[job.kind](client, job)
    file.with_suffix(".done.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main()
