"""Sparse attention (DeepSeek-V3.2): trained on given data and exported on a CPU, where it is not served."""

import json
import time
from pathlib import Path

import pytest
import torch

from engine.base.families import attention_of
from engine.catalog.catalog import Catalog, Policy, migrate
from engine.errors import ConfigError
from engine.planning import gpu
from engine.quality.probe import from_json
from engine.services import lifecycle as services
from engine.settings.params import Params
from engine.training.model.lora import ResidentBase
from engine.training.model.packing import Example, TokenRow
from engine.training.service.export import Exporter
from engine.training.service.protocol import AdamParams, CreateSession, Export, OptimStep
from engine.training.service.session import Session
from tests.helpers.mla_bases import deepseek_v32
from tests.helpers.own_ports import own_ports
from tests.helpers.resident_bases import resident
from tests.helpers.training_pass import gather

PROMPTS = [[7, 8, 9, 10, 11, 12], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49]]
# Longer than the six keys that a token may see.
ROWS = [TokenRow((*range(30 + i, 42 + i), 50, 51 + i, 52), 12) for i in range(4)]


@pytest.fixture(scope="module")
def path(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepseek_v32(tmp_path_factory.mktemp("bases") / "dsa", tiny_base)


@pytest.fixture(scope="module")
def base(path: Path) -> ResidentBase:
    return resident(path, 1, 256)


def opened(base: ResidentBase) -> CreateSession:
    targets = list(base.shapes.targets)
    return CreateSession(
        request_id="open", session="dsa-1", policy="dsa", rank=4, alpha=8.0, targets=targets, seed=3,
        holder="me",
    )  # fmt: skip


def test_a_token_sees_the_picked_keys_alone_padded_or_not(base: ResidentBase, path: Path):
    long = TokenRow(tuple(range(60, 90)), 20)
    together = base.score(None, [*ROWS, long])
    for row, found in zip([*ROWS, long], together, strict=True):
        assert base.score(None, [row])[0] == pytest.approx(found, abs=1e-5)
    assert not base.packs
    other = resident(path, 1, 256)
    for layer in other.model.model.layers:
        layer.self_attn.indexer.index_topk = 64
    every = other.score(None, [long])[0]
    assert max(abs(a - b) for a, b in zip(every, together[-1], strict=True)) > 0.01


def test_the_indexer_carries_no_adapter(base: ResidentBase):
    assert not any("indexer" in name for name in base.modules)
    with pytest.raises(ConfigError, match="weights_proj, wq_b"):
        base.new_adapter(4, 8.0, ("q_a_proj", "wq_b", "weights_proj"), torch.Generator())


def test_a_session_learns_given_answers_and_its_revision_opens_in_peft(base, path, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    session = Session(tmp_path / "session", base, "b" * 64, opened(base))
    losses = []
    for step in range(8):
        found = gather(session, [Example(row) for row in ROWS], "cross_entropy")
        losses.append(found.metrics.loss)
        adam = AdamParams(learning_rate=1e-2)
        session.optim_step(OptimStep(request_id=str(step), session="dsa-1", fence=0, adam_params=adam))
    assert losses[-1] < 0.5 * losses[0], losses

    params = Params(state_dir=tmp_path / "state")
    paths = params.paths
    paths.root.mkdir()
    migrate(paths.catalog_url)
    catalog = Catalog(paths.catalog_url)
    catalog.policies.add(Policy("dsa", "b" * 64, {}, "test", time.time()))
    export = Export(request_id="e", session="dsa-1", fence=0, kind="revision", probe_prompts=PROMPTS)
    exported = Exporter(params, catalog, torch.float32, (1,)).export(session, export)
    catalog.close()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), str(exported.directory))
    probe = json.loads((exported.directory / "probe.json").read_text())
    for row in from_json(probe).rows:
        tokens = torch.tensor([row.tokens])
        with torch.no_grad():
            logprobs = model.eval()(tokens).logits[0, :-1].log_softmax(-1)
            with model.disable_adapter():
                plain = model(tokens).logits[0, :-1].log_softmax(-1)
        chosen = tokens[0, 1:, None]
        for found, want in ((row.adapter, logprobs), (row.base, plain)):
            torch.testing.assert_close(torch.tensor(found), want.gather(1, chosen)[:, 0], rtol=0, atol=3e-5)
        assert (logprobs - plain).abs().max() > 0.1


def refuse_to_build() -> None:
    pytest.fail("the base was built")


def test_serving_it_on_a_cpu_is_refused_before_anything_is_built(tmp_path, monkeypatch):
    params = own_ports(state_dir=tmp_path, base={"name": "tiny-dsa"})
    with pytest.raises(ConfigError, match=r"'tiny-dsa'.*CUDA"):
        services.up(params, refuse_to_build, lambda name, state: None)
    monkeypatch.setattr(gpu, "cuda_bytes", lambda: 80 << 30)
    gpu.refuse_unless_served(params)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_a_base_is_sparse_by_its_type_where_its_config_leaves_the_indexer_out(kind, path):
    config = json.loads((path / "config.json").read_text()) | {"model_type": kind}
    whole = attention_of(config)
    for left_out in (("index_n_heads", "index_topk", "index_head_dim"), ("index_head_dim", "index_n_heads")):
        trimmed = attention_of({name: value for name, value in config.items() if name not in left_out})
        assert trimmed.cuda_only == whole.cuda_only is not None
        assert trimmed.projections() == whole.projections()


def test_a_service_that_there_is_not_is_named(tmp_path):
    with pytest.raises(ConfigError, match="Unknown service 'trainr'"):
        services.up(own_ports(state_dir=tmp_path), refuse_to_build, lambda name, state: None, ["trainr"])
