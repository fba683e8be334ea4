"""A sample of the registered adapters through the real engine, and the same adapters by two other routes.

The second route shares nothing with bulk registration but the engine: tensors made anew are named by
`revision.digest`, packed by `packed.pack` and published one by one. The third shares no code of ours at all
behind the revision directory: `peft` opens it and transformers computes.
"""

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import _memory as memory
import psutil
import torch
from _catalog_adapters import Maker

from engine.adapters.revision import make_manifest, write_revision
from engine.catalog.records import served_name
from tests.helpers.live import RunningEngine
from tests.helpers.parity import ask, prompts

# Fewer than the gateway's queue for cold loads takes.
WAVE = 16
TOKENS = 12


@dataclass(frozen=True)
class Served:
    """What the sample showed. Differences are of log-probabilities, in nats; `effect_nats` is the median
    over adapters of what they change of the base's."""

    asked: int
    unlike_direct: int
    peft_nats: float
    peft_median_nats: float
    effect_nats: float


def serve(
    engine: RunningEngine, maker: Maker, sample: Sequence[tuple[int, str, str]], scratch: Path
) -> Served:
    """Ask each adapter of the sample, (number, policy, digest), by all three routes."""
    asked = prompts(64)
    questions = [asked[i % len(asked)] for i in range(len(sample))]
    bulk = [served_name(policy, digest) for _, policy, digest in sample]
    got = answers(engine, bulk, questions)
    direct = [
        engine.publish(f"direct-{i % 100}", maker.one(number), maker.kind.rank, maker.dtype)
        for i, (number, _, _) in enumerate(sample)
    ]
    wanted = answers(engine, direct, questions)
    assert [name.partition("@")[2] for name in direct] == [name.partition("@")[2] for name in bulk]
    unlike = sum(
        (one["ids"], one["logprobs"]) != (other["ids"], other["logprobs"])
        for one, other in zip(got, wanted, strict=True)
    )
    through_peft = Peft(engine.base_path, engine.base_digest, scratch)
    off, effects = [], []
    for (number, policy, _), question, answer in zip(sample, questions, got, strict=True):
        told = torch.tensor(answer["logprobs"])
        with_adapter, without = through_peft.logprobs(maker, number, policy, question, answer["ids"])
        off.append((told - with_adapter).abs().max().item())
        effects.append((told - without).abs().max().item())
    return Served(
        len(sample),
        unlike,
        max(off),
        torch.tensor(off).median().item(),
        torch.tensor(effects).median().item(),
    )


def answers(engine: RunningEngine, names: Sequence[str], questions: Sequence[list[int]]) -> list[dict]:
    """Return each name's greedy tokens with their log-probabilities."""
    found: list[dict] = []
    for start in range(0, len(names), WAVE):
        pairs = list(zip(names, questions, strict=True))[start : start + WAVE]
        found += asyncio.run(ask(engine, pairs, TOKENS))
    return found


class Peft:
    """transformers and peft on revision directories, in float32."""

    def __init__(self, base: Path, base_digest: str, scratch: Path):
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self._base_digest, self._scratch = base_digest, scratch

    def logprobs(
        self, maker: Maker, number: int, policy: str, question: list[int], answer: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities of an answer's tokens with an adapter and without one."""
        from peft import PeftModel

        tensors = maker.one(number)
        manifest = make_manifest(
            tensors, policy=policy, base_digest=self._base_digest, rank=maker.kind.rank,
            targets=maker.kind.leaves, step=0,
        )  # fmt: skip
        directory = write_revision(self._scratch / manifest.digest, tensors, manifest, {})
        with_adapter = PeftModel.from_pretrained(self._model, directory)
        found = self._of(with_adapter, question, answer)
        self._model = with_adapter.unload()
        shutil.rmtree(directory)
        return found, self._of(self._model, question, answer)

    @staticmethod
    def _of(model: torch.nn.Module, question: list[int], answer: list[int]) -> torch.Tensor:
        ids = torch.tensor([question + answer])
        with torch.no_grad():
            told = model(ids).logits.float().log_softmax(-1)[0, len(question) - 1 : -1]
        return told.gather(1, ids[0, len(question) :, None])[:, 0]


def session_peak_bytes(pid: int) -> int:
    """Return the largest resident size of a server and its children, together."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(memory.peak_bytes(process.pid) for process in processes)
