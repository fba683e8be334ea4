"""A trainer without any optional part: a run of two steps up to its revision, and what it imports."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

from engine.adapters.revision import read_revision
from engine.base.prompts import end_tokens, tokenizer_of
from engine.base.resident import ensure_base
from engine.catalog.catalog import Catalog, migrate
from engine.ledger.spool import Spool, read_lines, ready_files
from engine.problems.verifiers import Verifier
from engine.settings.params import Params
from engine.settings.policies import PolicyConfig
from engine.training.line_of_training import Line
from engine.training.loop import export_revision, next_step, open_session
from engine.training.model.lora import ResidentBase
from engine.training.rollout_data import Ahead, Source
from engine.training.run import Run
from engine.training.sample_groups import Groups, Sample, Sampling
from engine.training.service.app import make_app
from engine.training.service.client import TrainerClient
from engine.training.service.export import Exporter
from engine.training.service.trainer import Trainer
from tests.helpers.import_graph import OPTIONAL, is_in

LOADED = """
import sys, engine.training.loop, engine.training.service.app, engine.training.service.trainer
print(*sys.modules, sep="\\n")
"""
CONFIG = PolicyConfig(task="addition", suite="s", groups=2, group_size=2, steps=2, rank=4)


@dataclass
class Answers:
    """Stands for an engine: of two answers to a sum one is right."""

    tokenizer: Any

    def sample(self, key: str, model: str, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        return [[self.answer(prompt, wrong) for wrong in range(sampling.group_size)] for prompt in prompts]

    def answer(self, prompt: Sequence[int], wrong: int) -> Sample:
        terms = re.findall(r"\d+", self.tokenizer.decode(prompt))
        text = str(sum(map(int, terms)) + wrong)
        tokens = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        return Sample(tokens, (-2.0,) * len(tokens), text)

    def close(self) -> None: ...


@pytest.fixture
def bare(tiny_base: Path, tmp_path: Path) -> Iterator[tuple[Run, Trainer]]:
    params = Params(state_dir=tmp_path, base={"name": str(tiny_base)}, policies={"sums": CONFIG})
    info = ensure_base(params.base, params.paths)
    migrate(params.paths.catalog_url)
    with closing(Catalog(params.paths.catalog_url)) as catalog:
        exporter = Exporter(params, catalog, torch.float32, end_tokens(info.path))
        trainer = Trainer(params, ResidentBase(info.path, 1, 512), info.digest, exporter, 1 << 30)
        line, tokenizer = Line("sums-1", None, 3, ("q_proj", "down_proj")), tokenizer_of(info.path)
        source = Source("sums", CONFIG, line, tokenizer, "", "", "base", engines=Answers(tokenizer))
        client = TrainerClient.of(params)
        client.http = TestClient(make_app(trainer))
        spool = Spool(params.paths.spool, "train-sums")
        run = Run(params, "sums", CONFIG, line, source, Ahead(source), client, spool, Verifier(CONFIG))
        with closing(trainer), closing(run):
            yield run, trainer


def test_a_run_reaches_its_revision(bare: tuple[Run, Trainer]) -> None:
    run, trainer = bare
    session = open_session(run)
    while session.step < CONFIG.steps:
        session = next_step(run, session)
    first, second = session.history
    assert [row["reward"] for row in session.history] == [0.5, 0.5]
    assert min(row["grad_norm"] for row in session.history) > 0
    # The second step sampled from what the first one learned.
    assert first["digest"] is None
    assert trainer.exporter.catalog.revisions.get("sums", second["digest"]).state == "snapshot"
    exported = export_revision(run, session)
    assert exported.directory
    assert read_revision(exported.directory, trainer.base_digest)[1].digest == exported.digest
    run.spool.rotate()
    assert sum(len(list(read_lines(file))) for file in ready_files(run.spool.root)) == CONFIG.steps


@pytest.mark.long
def test_it_loads_none_of_them() -> None:
    answer = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    # What kind of base it is, the table of families says.
    loaded = [name for name in answer.stdout.split() if not is_in(name, {"engine.base"})]
    assert [name for name in loaded if is_in(name, OPTIONAL)] == []
