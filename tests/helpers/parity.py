"""Served adapters against the second route: B @ A written into the weights of transformers' own model.

Requests go to a live engine; what it answers is scored again by a reference of each adapter.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from engine.base.families import BaseShapes
from tests.helpers.live import RunningEngine

RANK = 8
# How many requests a batch has, and at which name it begins, so that a small one has adapters too.
BATCHES = ((1, 7), (2, 7), (8, 1), (64, 0))
QUESTION = {"prompt": [7, 8, 9, 10], "max_tokens": 4, "temperature": 0, "logprobs": 1}
Request = tuple[str, list[int]]


def random_adapter(
    shapes: Mapping[str, tuple[int, int]],
    seed: int,
    leaves: tuple[str, ...] | None = None,
    rank: int = RANK,
    size: float = 0.3,
) -> dict[str, torch.Tensor]:
    """Make canonical tensors on the modules of `shapes`, or on those whose last names are in `leaves`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (inputs, outputs) in shapes.items():
        if leaves is None or name.rpartition(".")[2] in leaves:
            a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            b = torch.randn(outputs, rank, generator=generator) * size
            tensors |= {f"{name}.lora_A": a, f"{name}.lora_B": b}
    return tensors


def kinds_of(base: Path) -> list[dict[str, torch.Tensor]]:
    """Make adapters on each target of a base alone, and on all together, last."""
    shapes = BaseShapes.read(base)
    leaves = [(name,) for name in shapes.targets] + [None]
    return [random_adapter(shapes.modules(), 100 + i, leaf) for i, leaf in enumerate(leaves)]


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [
        torch.randint(
            5, 300, (int(torch.randint(4, 24, (1,), generator=generator)),), generator=generator
        ).tolist()
        for _ in range(count)
    ]


async def ask(engine: Any, requests: Sequence[Request], tokens: int = 12) -> list[dict]:
    """Send all requests at once; return each one's token ids and log-probabilities."""
    headers = {"authorization": f"Bearer {engine.key}"}
    limits = httpx.Limits(max_connections=128)
    async with httpx.AsyncClient(base_url=engine.url, headers=headers, timeout=120, limits=limits) as client:

        async def one(model: str, prompt: list[int]) -> dict:
            body = {
                "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1,
                "return_token_ids": True, "ignore_eos": True,
            }  # fmt: skip
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            choice = response.json()["choices"][0]
            return {
                "ids": choice["token_ids"],
                "logprobs": choice["logprobs"]["token_logprobs"],
                "revision": response.headers.get("x-graftwork-revision"),
            }

        return await asyncio.gather(*(one(model, prompt) for model, prompt in requests))


def weight_of(model: Any, module: str) -> torch.Tensor:
    """Return the (out, in) view of the base's weight that a canonical module stands for."""
    parent, _, rest = module.partition(".experts.")
    if not rest:
        return model.get_submodule(module).weight.data
    number, leaf = rest.split(".")
    experts = model.get_submodule(f"{parent}.experts")
    if leaf == "down_proj":
        return experts.down_proj.data[int(number)]
    gate, up = experts.gate_up_proj.data[int(number)].chunk(2)
    return gate if leaf == "gate_proj" else up


def merge(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Add B @ A of every module to the model's weights."""
    for module in {key.rpartition(".lora_")[0] for key in tensors}:
        weight_of(model, module).add_(tensors[f"{module}.lora_B"] @ tensors[f"{module}.lora_A"])


class Reference:
    """transformers with an adapter's B @ A written into the weights, or without an adapter."""

    def __init__(self, base: Path, tensors: dict | None, dtype: torch.dtype = torch.float32):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        merge(self.model, tensors or {})
        self.model.to(dtype)

    def logprobs(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            logprobs = self.model(ids).logits.float().log_softmax(-1)[0, len(prompt) - 1 : -1]
        return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]


def references_of(
    base: Path, names: Sequence[str], kinds: Sequence[dict], dtype: torch.dtype = torch.float32
) -> dict[str, Reference]:
    """Return the references of served adapters by name; the last name is the base's."""
    return {name: Reference(base, kind, dtype) for name, kind in zip(names, [*kinds, None], strict=True)}


def differences(requests: Sequence[Request], answers: list[dict], references: dict) -> torch.Tensor:
    """Return the largest difference of log-probability of each answer from its model's reference."""
    found = []
    for (name, prompt), answer in zip(requests, answers, strict=True):
        want = references[name].logprobs(prompt, answer["ids"])
        found.append((torch.tensor(answer["logprobs"]) - want).abs().max())
    return torch.stack(found)


def own_differences(
    requests: Sequence[Request], answers: list[dict], references: dict, rounded: dict
) -> torch.Tensor:
    """Return the largest difference of each answer's log-probabilities between two sets of references."""
    return torch.stack(
        [
            (references[name].logprobs(prompt, a["ids"]) - rounded[name].logprobs(prompt, a["ids"]))
            .abs()
            .max()
            for (name, prompt), a in zip(requests, answers, strict=True)
        ]
    )


def mixed(names: Sequence[str], count: int, shift: int = 0) -> list[Request]:
    """Requests that go round all names, the base among them."""
    return [(names[(i + shift) % len(names)], prompt) for i, prompt in enumerate(prompts(count))]


def publish_all(engine: RunningEngine, kinds: Sequence[dict], dtype: torch.dtype | None = None) -> list[str]:
    """Publish every adapter; return their served names and the base's, last."""
    return [*(engine.publish("kinds", kind, RANK, dtype) for kind in kinds), engine.base_name]


def check_parity(
    engine: RunningEngine,
    kinds: Sequence[dict],
    tolerance: float,
    batches: Sequence[tuple[int, int]] = BATCHES,
    effect: float = 0.05,
) -> None:
    """Adapters mixed, base rows between them: answers are within `tolerance` nats of the references."""
    names = publish_all(engine, kinds)
    references = references_of(engine.base_path, names, kinds)
    for count, shift in batches:
        requests = mixed(names, count, shift)
        answers = asyncio.run(ask(engine, requests))
        assert differences(requests, answers, references).max() < tolerance
    # Each kind must matter, or this test proves nothing.
    plain = references[engine.base_name]
    for name, (_, prompt), answer in zip(names[:-1], requests, answers, strict=False):
        change = references[name].logprobs(prompt, answer["ids"]) - plain.logprobs(prompt, answer["ids"])
        assert change.abs().max() > effect


def base_rows(engine: RunningEngine, names: Sequence[str], mine: list[list[int]]) -> list[dict]:
    """Return the base's answers from one batch in which a row of an adapter stands before each."""
    requests = []
    for i, prompt in enumerate(mine):
        requests += [(names[i % len(names)], prompt), (engine.base_name, prompt)]
    return asyncio.run(ask(engine, requests))[1::2]


def healthy(engine: RunningEngine, tensors: dict) -> Callable[..., None]:
    """Publish a good adapter; return what asks it, or another name, for the answer that it gave first."""
    good = engine.publish("healthy", tensors, RANK)

    def answer(name: str) -> tuple:
        with engine.client() as client:
            response = client.post("/v1/completions", json={"model": name, **QUESTION})
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        return choice["text"], tuple(choice["logprobs"]["token_logprobs"])

    first = answer(good)

    def check(name: str | None = None) -> None:
        assert answer(name or good) == first
        assert engine.process.poll() is None

    return check


def out_of_route(engine: RunningEngine, models: dict[str, dict | None]) -> list[float]:
    """Return the share of each model's sampled tokens whose experts in the trainer are others.

    Two short prompts and one longer than a block of the cache, which the second time are taken from it.
    """
    from engine.training.model.packing import TokenRow
    from engine.training.model.replay import decode
    from engine.training.sample_groups import Sampling, sample_groups
    from tests.helpers.resident_bases import resident

    asked = [*prompts(2), torch.randint(5, 300, (170,)).tolist()]
    sampling = Sampling(group_size=4, max_tokens=40, routed_experts=True)
    trainer, shares = resident(engine.base_path, 1, 2048), []
    trainer.replay.follows = False
    for name, tensors in models.items():
        adapter = trainer.hold(tensors) if tensors else None
        for _ in range(2):
            groups = sample_groups(engine.url, engine.key, name, asked, sampling)
            drawn = [
                (prompt, sample) for prompt, group in zip(asked, groups, strict=True) for sample in group
            ]
            rows = [TokenRow((*p, *s.tokens), len(p), decode(s.routed_experts)) for p, s in drawn]
            assert [len(row.routes) for row in rows] == [len(row.tokens) - 1 for row in rows]
            trainer.score(adapter, rows)
            strayed, known = trainer.replay.take()
            shares.append(strayed / known)
    return shares
