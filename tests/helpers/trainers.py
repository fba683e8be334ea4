"""Trainers in this process, one after the other, spoken to over HTTP."""

from dataclasses import dataclass
from pathlib import Path

import torch
from starlette.testclient import TestClient

from engine.catalog.catalog import migrate
from engine.catalog.opening import whole_catalog
from engine.publishing.foreign import read_tensors
from engine.settings.params import Params
from engine.training.model.lora import ResidentBase
from engine.training.service import sessions
from engine.training.service.app import make_app
from engine.training.service.client import TrainerClient
from engine.training.service.export import Exporter
from engine.training.service.protocol import SessionInfo
from engine.training.service.session import Session
from engine.training.service.trainer import Trainer
from tests.helpers.trainer_service import SETTINGS

DIGEST = "b" * 64

NEW = {**SETTINGS, "holder": "a"}


@dataclass
class Live:
    """A trainer in this process, and a client that speaks HTTP with it."""

    trainer: Trainer
    client: TrainerClient

    def session(self, info: SessionInfo) -> Session:
        found = self.known(info.session).session
        assert found
        return found

    def known(self, name: str) -> sessions.Known:
        found = self.trainer.sessions.find(name)
        assert found
        return found

    def resident(self) -> set[str]:
        return {row["session"] for row in self.client.sessions() if row["resident"]}


class Trainers:
    """Trainers on one base and one state directory, one after the other."""

    def __init__(self, base: ResidentBase, state: Path):
        self.base, self.state, self.now = base, state, None
        migrate(Params(state_dir=state).paths.catalog_url)

    def start(self, held: float = 100, **settings) -> Live:
        """Start a trainer, with room for `held` sessions of `NEW`; the one before ends as by a kill."""
        self.stop()
        params = Params.model_validate(
            {"state_dir": self.state, "trainer": settings, "python_modules": ["leaving"]}
        )
        exporter = Exporter(params, whole_catalog(params.paths.catalog_url), torch.float32, ())
        room = int(held * bytes_of_new(self.base))
        trainer = Trainer(params, self.base, DIGEST, exporter, room, read_tensors=read_tensors)
        client = TrainerClient("http://trainer", patience_s=1, busy_s=0.0)
        client.http = TestClient(make_app(trainer), base_url="http://trainer")
        self.now = Live(trainer, client)
        return self.now

    def stop(self) -> None:
        if self.now:
            self.now.client.close()
            self.now.trainer.close()
            self.now.trainer.exporter.catalog.close()


def bytes_of_new(base: ResidentBase) -> int:
    """Return the bytes of a session of `NEW` from its tensors: factor, gradient and two moments."""
    adapter = base.new_adapter(NEW["rank"], 8.0, NEW["targets"], torch.Generator())
    return 4 * sum(factor.nbytes for factor in adapter.factors.values())


def gradients(session: Session) -> dict[str, torch.Tensor]:
    found = {
        key: factor.grad.clone() for key, factor in session.adapter.factors.items() if factor.grad is not None
    }
    assert found
    return found
