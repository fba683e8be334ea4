"""The effect probe of an adapter that no session trained, such as an imported one.

A running trainer on the same base computes it; otherwise the base is loaded in this process. The questions
are fixed, because an imported adapter has no task of its own.
"""

import uuid
from collections.abc import Callable
from pathlib import Path

from engine.adapters.revision import Manifest
from engine.base.prompts import end_tokens, prompt_ids, tokenizer_of
from engine.base.resident import BaseInfo
from engine.catalog.opening import open_catalog
from engine.errors import ServiceError
from engine.planning.gpu import planned
from engine.publishing.importing import serving_dtype
from engine.quality.probe import Probe
from engine.settings.params import Params
from engine.training.service.client import TrainerClient
from engine.training.service.export import Exporter
from engine.training.service.protocol import ProbeRevision

QUESTIONS = (
    "What is 12 + 7?",
    "Sort these numbers: 9, 4, 31, 2.",
    "Name three colours and nothing else.",
    "Write one sentence about the sea.",
    "Is 17 a prime number? Answer yes or no.",
    "Translate 'good morning' into French.",
    "Return the JSON object with the key a and the value 1.",
    "Who are you?",
)
TOKENS = 24


def probe_by_base(params: Params, base: BaseInfo, say: Callable[[str], object]) -> Callable[..., Probe]:
    """Return a function that computes the probe of a revision's directory; `say` receives progress.

    The function raises `AdapterError` when the revision does not fit the base.
    """

    def probe(manifest: Manifest, directory: Path) -> Probe:
        tokenizer = tokenizer_of(base.path)
        prompts = [prompt_ids(tokenizer, question) for question in QUESTIONS]
        with TrainerClient.of(params, patience_s=0.0) as trainer:
            if _serves(trainer, base):
                say("The trainer computes the effect probe.")
                return trainer.probe_revision(manifest.policy, manifest.digest, prompts, TOKENS, directory)
        say("No trainer runs on this base: loading the base here to compute the effect probe.")
        return _computed_here(params, base, manifest, directory, prompts)

    return probe


def _serves(trainer: TrainerClient, base: BaseInfo) -> bool:
    try:
        return bool(trainer.health()["base"] == base.digest)
    except ServiceError:
        return False


def _computed_here(
    params: Params, base: BaseInfo, manifest: Manifest, directory: Path, prompts: list[list[int]]
) -> Probe:
    import torch

    from engine.training.service.app import load_base

    request = ProbeRevision(
        request_id=uuid.uuid4().hex,
        policy=manifest.policy,
        digest=manifest.digest,
        directory=str(directory),
        prompts=prompts,
        tokens=TOKENS,
    )
    dtype = getattr(torch, serving_dtype(params))
    with open_catalog(params.paths, migrated=True) as catalog:
        exporter = Exporter(params, catalog, dtype, end_tokens(base.path))
        resident = load_base(params, base.path, planned(params))
        return exporter.probe_revision(resident, base.digest, request)
