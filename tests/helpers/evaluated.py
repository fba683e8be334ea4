"""Engine and controller under their supervisor, releases that an evaluator decides, and their users."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import pytest
import torch

from engine.adapters import packed, revision
from engine.base.families import BaseShapes
from engine.base.resident import BaseInfo, ensure_base
from engine.catalog.catalog import Catalog, Policy, Revision, migrate
from engine.catalog.opening import whole_catalog
from engine.clients.controller import ControllerClient
from engine.ledger.ledger import open_snapshot
from engine.services import lifecycle as services
from engine.settings.params import Params, load_params
from engine.store.open import open_store
from tests.helpers.bench_files import load
from tests.helpers.live import eventually, left_behind
from tests.helpers.operated import write_settings

POLICY, MODULE = "evaluated", "own_evaluator"
RANK, PAUSE_S = 8, 0.1
SPENT = "SELECT coalesce(sum(seconds), 0), count(score) FROM evaluations WHERE release = $release"


@dataclass
class Live:
    """The installation, and the digests of the policy's revisions, which nobody has released yet."""

    params: Params
    key: str
    controller: ControllerClient
    digests: Sequence[str]

    def start(self, digest: str, evaluator: dict[str, Any], **settings: Any) -> str:
        """Start a release that the module's function `score` decides alone, errors aside; return its id."""
        one = {"kind": f"python:{MODULE}:score", "decides": "both", "per_minute": 100_000}
        given = {
            "feedback": "evaluators",
            "weight": 0.5,
            "max_s": 3600,
            "guards": ["errors"],
            "evaluators": {"own": one | evaluator},
        }
        skipped = {"score": "It has no suite."}
        return str(self.controller.start_release(POLICY, digest, given | settings, skipped, "me")["id"])

    def set_champion(self, digest: str) -> None:
        """Route all users to a revision."""
        with closing(whole_catalog(self.params.paths.catalog_url)) as catalog:
            route = catalog.routes.get(POLICY)
            catalog.routes.update(replace(route, champion=digest), route.version)

    def row(self, query: str, release: str = "") -> tuple[Any, ...]:
        """Return the only row of a query on the ledger as it is now."""
        self.controller.publish_ledger()
        with open_snapshot(self.params.paths.ledger_snapshot) as ledger:
            named = {"release": release} if "$release" in query else {}
            return tuple(ledger.execute(query, named).fetchall()[0])

    def scores(self, release: str) -> int:
        """Return how many scores a release has."""
        return int(self.row(SPENT, release)[1])

    def evaluators(self) -> list[psutil.Process]:
        """Return the evaluators' processes."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                line = " ".join(process.cmdline())
                is_theirs = re.search(r"-m engine\.evaluation ", line) and str(self.params.state_dir) in line
                if is_theirs and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def evaluator(self) -> tuple[psutil.Process, list[psutil.Process]]:
        """Wait for the evaluators' process and its function's own; return both."""
        assert eventually(lambda: any(one.children() for one in self.evaluators()), 60)
        (process,) = self.evaluators()
        return process, process.children(recursive=True)


@dataclass
class Asked:
    """A user's request: when it was sent and answered (monotonic seconds), and what was wrong."""

    sent: float
    ended: float
    fault: str


@dataclass
class Users:
    """`count` users of the policy at once, for the `with` block: each asks as another user every time.

    `question` makes the text of a number.
    """

    live: Live
    question: Callable[[int], str]
    count: int = 4
    asked: list[Asked] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._leaving = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(self.count)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        headers = {"authorization": f"Bearer {self.live.key}"}
        with httpx.Client(base_url=self.live.params.url("engine"), headers=headers, timeout=60) as client:
            while not self._leaving.wait(PAUSE_S):
                sent = time.monotonic()
                try:
                    fault = self._stream(client, number)
                except httpx.HTTPError as error:
                    fault = repr(error)
                self.asked.append(Asked(sent, time.monotonic(), fault))
                number += self.count

    def _stream(self, client: httpx.Client, number: int) -> str:
        body = {
            "model": POLICY, "messages": [{"role": "user", "content": self.question(number)}],
            "max_tokens": 8, "temperature": 0, "stream": True, "user": f"user-{number}",
        }  # fmt: skip
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            told = response.read().decode()
        is_whole = response.status_code == 200 and "[DONE]" in told and '"error"' not in told
        return "" if is_whole else f"{response.status_code}: {told[:200]}"


def publish(params: Params, catalog: Catalog, base: BaseInfo, scales: Sequence[float]) -> list[str]:
    """Publish a revision with random tensors for each scale, which its probe accepts; return the digests."""
    shapes = BaseShapes.read(base.path)
    with pytest.MonkeyPatch.context() as patch:
        drawn = load("_made", patch).template(shapes, RANK, torch.float32)
    targets = tuple(sorted({key.rpartition(".lora_")[0].rpartition(".")[2] for key in drawn}))
    catalog.policies.add(Policy(POLICY, base.digest, {}, "test", time.time()))
    digests = []
    with closing(open_store(params)) as store:
        for scale in scales:
            tensors = {name: tensor * scale for name, tensor in drawn.items()}
            digest = revision.digest(tensors, RANK, targets, base.digest)
            whole = packed.pack(tensors, torch.float32, shapes.fused)
            (at,) = store.append_many([whole.tobytes()])
            catalog.layouts.add(whole.layout.digest, whole.layout.to_json())
            row = Revision(
                **at._asdict(), policy=POLICY, digest=digest, base=base.digest, parent=None, step=0,
                rank=RANK, bytes=at.length, layout=whole.layout.digest, state="exported", owner="test",
                created_at=time.time(),
            )  # fmt: skip
            catalog.revisions.add_many([row])
            catalog.revisions.set_probe(POLICY, digest, {"accepted": True, "reason": "Made for this."})
            digests.append(digest)
    return digests


@contextmanager
def installation(state: Path, evaluator: str, scales: Sequence[float], **settings: Any) -> Iterator[Live]:
    """Run engine and controller on a state of their own, with `evaluator` as the text of the own module."""
    (state / f"{MODULE}.py").write_text(evaluator)
    with pytest.MonkeyPatch.context() as patch:
        # The services get this process's variables.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(state), os.environ.get("PYTHONPATH", "")]))
        params = load_params(write_settings(state, policies={}, python_modules=[MODULE], **settings))
        migrate(params.paths.catalog_url)
        with closing(whole_catalog(params.paths.catalog_url)) as catalog:
            key = catalog.keys.ensure_local(params.paths.local_key)
        build = partial(ensure_base, params.base, params.paths)
        with services.session(params, build, lambda *_: None, ("engine", "controller")):
            with closing(whole_catalog(params.paths.catalog_url)) as catalog:
                digests = publish(params, catalog, build(), scales)
            with ControllerClient(params.url("controller"), key, patience_s=60) as controller:
                yield Live(params, key, controller, digests)
    assert left_behind(state) == []
