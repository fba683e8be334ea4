"""The effect probe as a gate on a live engine and a live trainer: each fault made for real, at the boundary.

What is shipped is right: directory, digest and probe. What the store holds for the engine is not.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from engine.adapters import packed
from engine.adapters.revision import make_manifest, write_revision
from engine.base.families import BaseShapes
from engine.catalog.catalog import Base, Policy, Revision
from engine.catalog.records import served_name
from engine.controller.route_changes import GATE
from engine.ledger.ledger import Ledger
from engine.quality.probe import TOLERANCE, Probe
from engine.report.why import why
from engine.settings.params import Params, load_params
from tasks.verify import verify
from tests.helpers.live import RunningEngine, free_port
from tests.helpers.parity import RANK, ask, prompts, random_adapter
from tests.helpers.trainer_service import Service

TOL = TOLERANCE["float32"]
PROMPTS = prompts(4)
LAYER = "model.layers"


@dataclass
class Gate:
    """A live engine beside a live trainer, on one state directory."""

    engine: RunningEngine
    params: Params
    trainer: Service

    @property
    def shapes(self):
        return BaseShapes.read(self.engine.base_path)

    def ship(self, tensors: dict, policy: str = "gate", **probe) -> tuple[str, Probe]:
        """Write a revision's directory with the trainer's probe; return its digest and the probe."""
        rank = max(tensor.shape[0] for key, tensor in tensors.items() if key.endswith("lora_A"))
        targets = tuple(sorted({key.rpartition(".lora_")[0].rpartition(".")[2] for key in tensors}))
        manifest = make_manifest(
            tensors, policy=policy, base_digest=self.engine.base_digest, rank=rank, targets=targets, step=0
        )
        draft = write_revision(self.params.state_dir / "drafts" / manifest.digest, tensors, manifest, {})
        made = self.trainer.client.probe_revision(policy, manifest.digest, PROMPTS, 8, draft)
        directory = self.params.paths.revision(policy, manifest.digest)
        write_revision(directory, tensors, manifest, replace(made, **probe).to_json())
        return manifest.digest, made

    def serve(self, digest: str, tensors: dict, policy: str = "gate", **row) -> str:
        """Put these tensors into the store under a digest that may be another adapter's."""
        engine = self.engine
        whole = packed.pack(tensors, torch.float32, self.shapes.fused)
        at = engine.store.append(whole.tobytes())
        engine.catalog.policies.add(Policy(policy, engine.base_digest, {}, "test", time.time()))
        engine.catalog.layouts.add(whole.layout.digest, whole.layout.to_json())
        made = Revision(
            policy, digest, engine.base_digest, None, 0, RANK, at.length, whole.layout.digest, at.segment,
            at.offset, at.length, at.checksum, "exported", "test", time.time(),
        )  # fmt: skip
        engine.catalog.revisions.add_many([replace(made, **row)])
        return served_name(policy, digest)

    def verify(self, digest: str, policy: str = "gate") -> dict:
        return verify(self.params, policy, digest, self.engine.key)

    def verdicts(self, digest: str) -> list[tuple]:
        """Return the ledger's verdicts on a revision, after the readers' copy is renewed."""
        ledger = Ledger(self.params.paths.ledger)
        ledger.ingest(self.params.paths.spool)
        ledger.snapshot(self.params.paths.ledger_snapshot)
        query = 'SELECT verdict, "by", reason, evidence FROM verdicts WHERE digest = ?'
        rows = ledger.connection.execute(query, [digest]).fetchall()
        ledger.close()
        return rows


@pytest.fixture(scope="module")
def gate(engine: RunningEngine) -> Iterator[Gate]:
    file = engine.state / "gate.json"
    settings = json.loads((engine.state / "params.json").read_text())
    file.write_text(json.dumps(settings | {"trainer": {"port": free_port()}}))
    params = load_params(file)
    engine.catalog.bases.add(Base(engine.base_digest, "tiny", str(engine.base_path), time.time()))
    trainer = Service(params, file)
    trainer.start()
    yield Gate(engine, params, trainer)
    trainer.client.close()
    trainer.stop()


def changed(tensors: dict, change: Callable[[str, torch.Tensor], torch.Tensor]) -> dict:
    return {key: change(key, tensor) for key, tensor in tensors.items()}


def scaled(leaf: str, by: float) -> Callable[[dict], dict]:
    """Return what scales B of the modules whose names hold `leaf`."""
    return lambda tensors: changed(
        tensors, lambda key, tensor: tensor * by if leaf in key and key.endswith("B") else tensor
    )


def exchanged(one: str, other: str) -> Callable[[dict], dict]:
    """Return what gives the modules named `one` the factors of those named `other`, and the reverse."""

    def change(tensors: dict) -> dict:
        names = {key: key.replace(one, other) if one in key else key.replace(other, one) for key in tensors}
        return {key: tensors[names[key]] for key in tensors}

    return change


FAULTS: dict[str, tuple[Callable[[dict], dict], str, str]] = {
    "missing": (scaled("", 0.0), "serves the plain base", r"every module"),
    "partial": (
        scaled("layers.1.self_attn.v_proj", 0.0), "does not reproduce", r"self_attn.v_proj of layer 1"
    ),
    "one projection left out": (
        scaled("gate_proj", 0.0), "does not reproduce", r"mlp.gate_proj of layers 0 to 2"
    ),
    "doubled": (scaled("", 2.0), "does not reproduce", r"every module"),
    "one module doubled": (scaled("layers.2.mlp.down_proj", 2.0), "does not", r"mlp.down_proj of layer 2"),
    "gate and up swapped": (exchanged("gate_proj", "up_proj"), "does not", r"mlp.(gate|up)_proj of layers 0"),
    "keys and values swapped": (
        exchanged("layers.1.self_attn.k_proj", "layers.1.self_attn.v_proj"), "does not",
        r"self_attn.[kv]_proj of layer 1",
    ),
    "the queries' factors on the output": (
        lambda t: t | {f"{LAYER}.0.self_attn.o_proj.lora_{s}": t[f"{LAYER}.0.self_attn.q_proj.lora_{s}"]
                       for s in "AB"}, "does not", r"self_attn.o_proj of layer 0",
    ),
    "two layers swapped": (
        exchanged("layers.0.mlp.down", "layers.1.mlp.down"), "does not", r"mlp.down_proj of layers 0 to 2"
    ),
    "one module at a twentieth less": (
        scaled("layers.1.self_attn.q_proj", 0.95), "does not reproduce", r"self_attn.q_proj of layer 1"
    ),
}  # fmt: skip


# Each takes a search; these are faults of kinds that the others show too.
LONG = (
    "one projection left out",
    "one module doubled",
    "two layers swapped",
    "one module at a twentieth less",
)
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in FAULTS]


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_refused_by_name_and_nobody_is_served_it(gate: Gate, name):
    fault, sentence, module = FAULTS[name]
    right = random_adapter(gate.shapes.modules(), 100 + list(FAULTS).index(name), size=0.3)
    good = gate.serve(gate.ship(right, "fine")[0], right, "fine")
    before = alone(gate, good)
    digest, _ = gate.ship(right)
    served = gate.serve(digest, fault(right))
    result = gate.verify(digest)
    assert not result["accepted"]
    assert sentence in result["reason"]
    assert re.match(module, result["module"])
    assert result["module"] in result["reason"] or result["module"] == "every module"
    # No traffic: the catalog has a tombstone, and the gateway answers by it.
    with gate.engine.client() as client:
        answer = client.post("/v1/completions", json={"model": served, "prompt": [7], "max_tokens": 1})
    assert answer.status_code == 410
    ((verdict, by, reason, evidence),) = gate.verdicts(digest)
    assert (verdict, by, reason) == ("hold", GATE, result["reason"])
    assert json.loads(evidence)["probe"]["module"] == result["module"]
    (link,) = [link for link in why(gate.params, served).links if link.name == "verdict"]
    assert result["module"] in link.says or "Every module" in link.says
    # The engine is unharmed.
    assert alone(gate, good) == before


def alone(gate: Gate, name: str) -> list[dict]:
    """Ask one prompt after another: what shares a batch may move the last bit of a sum."""
    return [asyncio.run(ask(gate.engine, [(name, prompt)]))[0] for prompt in PROMPTS[:2]]


def test_what_is_right_is_accepted_and_needs_no_search(gate: Gate):
    tensors = random_adapter(gate.shapes.modules(), 90)
    digest, _ = gate.ship(tensors)
    name = gate.serve(digest, tensors)
    result = gate.verify(digest)
    assert result["accepted"], result
    assert result["error"] < TOL / 20
    assert result["effect"] == pytest.approx(result["claimed"], abs=TOL / 10)
    assert (result["module"], result["errors"]) == ("", {})
    assert not gate.verdicts(digest)
    with gate.engine.client() as client:
        answer = client.post("/v1/completions", json={"model": name, "prompt": [7], "max_tokens": 1})
    assert answer.status_code == 200


def test_the_search_leaves_no_revision_that_people_would_see(gate: Gate):
    tensors = random_adapter(gate.shapes.modules(), 91)
    digest, _ = gate.ship(tensors, "hidden")
    gate.serve(digest, scaled("k_proj", 0.0)(tensors), "hidden")
    rows = len(gate.engine.catalog.revisions.page("hidden", limit=1000))
    assert gate.verify(digest, "hidden")["module"] == "self_attn.k_proj of layers 0 to 2"
    assert [row.digest for row in gate.engine.catalog.listing.exported("hidden", 100)] == [digest]
    parts = [
        row for row in gate.engine.catalog.revisions.page("hidden", limit=1000) if row.state == "snapshot"
    ]
    projections, halvings = 7, 2
    assert 0 < len(parts) <= projections + 2 * halvings
    assert rows == 1
    assert all(row.expires_at < time.time() + 3600 for row in parts)


def test_another_base_is_refused_as_that(gate: Gate, tmp_path):
    """The probe's numbers are those of a base whose weights are a little other ones."""
    from transformers import AutoModelForCausalLM

    from engine.training.model.lora import ResidentBase
    from engine.training.service.export import Exporter
    from engine.training.service.protocol import ProbeRevision

    model = AutoModelForCausalLM.from_pretrained(gate.engine.base_path, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.05)
    model.save_pretrained(tmp_path / "base")
    tensors = random_adapter(gate.shapes.modules(), 92)
    digest, _ = gate.ship(tensors, "draft")
    with_it = Exporter(gate.params, gate.engine.catalog, torch.float32, ()).probe_revision(
        ResidentBase(tmp_path / "base", 1, 512), gate.engine.base_digest,
        ProbeRevision(
            request_id="x", policy="draft", digest=digest, prompts=PROMPTS, tokens=8,
            directory=str(gate.params.paths.revision("draft", digest)),
        ),
    )  # fmt: skip
    assert gate.ship(tensors, rows=with_it.rows)[0] == digest
    gate.serve(digest, tensors)
    result = gate.verify(digest)
    assert "a different base" in result["reason"]
    assert result["errors"] == {}
    assert gate.engine.catalog.tombstones.find("gate", digest).by == GATE


def test_a_revision_of_another_base_by_its_digest_is_refused_by_the_engine(gate: Gate):
    tensors = random_adapter(gate.shapes.modules(), 93)
    digest, probe = gate.ship(tensors)
    file = gate.params.paths.revision("gate", digest) / "probe.json"
    file.write_text(json.dumps(replace(probe, base_digest="f" * 64).to_json()))
    gate.serve(digest, tensors, base="f" * 64)
    result = gate.verify(digest)
    assert not result["accepted"]
    assert "base ffffffffffff" in result["reason"]
    assert len(gate.verdicts(digest)) == 1


def test_a_refused_load_is_a_verdict_with_its_module(gate: Gate):
    tensors = random_adapter(gate.shapes.modules(), 94)
    digest, _ = gate.ship(tensors)
    broken = {key: tensor.clone() for key, tensor in tensors.items()}
    broken[f"{LAYER}.1.mlp.up_proj.lora_B"][3, 2] = torch.nan
    gate.serve(digest, broken)
    result = gate.verify(digest)
    assert "holds NaN" in result["reason"]
    assert result["module"] == f"{LAYER}.1.mlp.gate_up_proj"
    ((verdict, _, reason, _),) = gate.verdicts(digest)
    assert (verdict, reason) == ("hold", result["reason"])


def test_without_a_trainer_it_is_refused_all_the_same(gate: Gate):
    tensors = random_adapter(gate.shapes.modules(), 95)
    digest, _ = gate.ship(tensors)
    gate.serve(digest, scaled("q_proj", 0.0)(tensors))
    away = gate.params.model_copy(
        update={"trainer": gate.params.trainer.model_copy(update={"port": free_port()})}
    )
    began = time.monotonic()
    result = verify(away, "gate", digest, gate.engine.key)
    assert not result["accepted"]
    assert result["module"] == "unknown"
    assert "The trainer at" in result["reason"]
    assert time.monotonic() - began < 30
    # With a trainer the same revision gets its module.
    assert gate.verify(digest)["module"] == "self_attn.q_proj of layers 0 to 2"


def test_a_gate_that_opens_again_lifts_its_own_tombstone_only(gate: Gate):
    tensors = random_adapter(gate.shapes.modules(), 96)
    digest, probe = gate.ship(tensors)
    gate.serve(digest, tensors)
    file = gate.params.paths.revision("gate", digest) / "probe.json"
    shifted = tuple(replace(row, adapter=tuple(value - 1 for value in row.adapter)) for row in probe.rows)
    file.write_text(json.dumps(replace(probe, rows=shifted).to_json()))
    refused = gate.verify(digest)
    # Every part is as it should be: it is the probe that is of something else.
    assert refused["module"] == "unknown"
    assert "projection alone" in refused["reason"]
    assert max(refused["errors"].values()) < TOL / 20
    file.write_text(json.dumps(probe.to_json()))
    assert gate.verify(digest)["accepted"]
    assert gate.engine.catalog.tombstones.find("gate", digest) is None
    gate.engine.catalog.tombstones.add("gate", digest, "a person's reason", "ada")
    assert gate.verify(digest)["accepted"]
    assert gate.engine.catalog.tombstones.find("gate", digest).by == "ada"


def test_a_champion_that_is_the_base_is_held_where_a_broken_one_is_rolled_back(gate: Gate):
    """Users of the first get the base's answers, as of no champion; those of the second would get a fault."""
    catalog, right = gate.engine.catalog, random_adapter(gate.shapes.modules(), 98)
    broken = {key: tensor.clone() for key, tensor in right.items()}
    broken[f"{LAYER}.0.mlp.up_proj.lora_B"][3, 2] = torch.nan
    empty = scaled("", 0.0)(right)
    for policy, shipped, stored, verdict in (
        ("as-the-base", empty, empty, "hold"),
        ("broken", right, broken, "rollback"),
    ):
        digest, _ = gate.ship(shipped, policy)
        gate.serve(digest, stored, policy)
        catalog.routes.update(replace(catalog.routes.get(policy), champion=digest), 0)
        result = gate.verify(digest, policy)
        assert not result["accepted"]
        assert [row[:3] for row in gate.verdicts(digest)] == [(verdict, GATE, result["reason"])]
        held = verdict == "hold"
        assert catalog.routes.get(policy).champion == (digest if held else None)
        assert (catalog.tombstones.find(policy, digest) is None) == held


def test_a_revision_that_is_the_base_answers_as_the_base_to_the_last_bit(gate: Gate):
    """All B zero, beside adapters of great effect: nothing of them leaks into its rows."""
    empty = scaled("", 0.0)(random_adapter(gate.shapes.modules(), 97))
    digest, _ = gate.ship(empty)
    name = gate.serve(digest, empty)
    others = [
        gate.engine.publish("loud", random_adapter(gate.shapes.modules(), 980 + i, size=1.0), RANK)
        for i in range(3)
    ]
    base = asyncio.run(ask(gate.engine, [(gate.engine.base_name, prompt) for prompt in PROMPTS]))
    requests = [(model, prompt) for prompt in PROMPTS for model in (name, *others)]
    for answers in (
        asyncio.run(ask(gate.engine, [(name, prompt) for prompt in PROMPTS])),
        asyncio.run(ask(gate.engine, requests))[:: len(others) + 1],
    ):
        assert [answer["ids"] for answer in answers] == [answer["ids"] for answer in base]
        assert [answer["logprobs"] for answer in answers] == [answer["logprobs"] for answer in base]
    result = gate.verify(digest)
    assert (result["accepted"], result["effect"], result["claimed"]) == (False, 0.0, 0.0)
    assert "is the base" in result["reason"]
    # A result and no fault: it is held, and not buried.
    assert gate.engine.catalog.tombstones.find("gate", digest) is None
    assert [row[0] for row in gate.verdicts(digest)] == ["hold"]
