"""A real model on one GPU, as far as a CPU shows it: precision, checkpointing, slots, arguments."""

import copy
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from engine.adapters import packed
from engine.adapters.adapter_sizes import slot_bytes
from engine.base.families import FUSED, BaseShapes
from engine.base.resident import BaseInfo
from engine.errors import BaseModelError, ConfigError
from engine.planning import host, tiers
from engine.planning.memory import GIB, MemoryPlan, plan
from engine.settings.losses import CORRECTIONS
from engine.settings.params import Params
from engine.settings.services import EngineConfig, TrainerConfig
from engine.training.loss.objective import Objective
from engine.training.model import lora
from engine.training.model.lora import ResidentBase
from engine.training.model.packing import TokenRow
from engine.training.model.update import tokens_of
from tests.helpers.real_model_page import DATA, DOC, QWEN3_06B, ROWS, doc_settings, flat
from tests.helpers.repository import ROOT
from tests.helpers.training_pass import one_pass

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def moved(base: ResidentBase, targets: tuple[str, ...] = TARGETS):
    """An adapter whose B is not zero any more."""
    generator = torch.Generator().manual_seed(3)
    adapter = base.new_adapter(4, 8.0, targets, generator)
    with torch.no_grad():
        for key, factor in adapter.factors.items():
            if key.endswith("lora_B"):
                factor.copy_(torch.randn(factor.shape, generator=generator) * 0.2)
    return adapter


def gradients(base: ResidentBase, targets: tuple[str, ...] = TARGETS):
    adapter = moved(base, targets)
    found = one_pass(base, adapter, DATA, "dapo", {})
    return found, {key: factor.grad for key, factor in adapter.factors.items()}


def saved_bytes(base: ResidentBase) -> int:
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    adapter, row = moved(base), TokenRow(tuple(range(5, 205)), 1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), base.using(adapter):
        base.logprobs([row])
    return sum(kept.values())


@pytest.fixture(scope="module")
def dropping_base(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base with dropout in its settings, which must stay off while its layers checkpoint."""
    copy = tmp_path_factory.mktemp("dropping") / "base"
    shutil.copytree(tiny_base, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    return copy


@pytest.mark.parametrize("targets", [TARGETS, ("v_proj",)])
def test_checkpointing_gives_the_same_gradients(dropping_base, targets):
    plain = ResidentBase(dropping_base, 1, 64)
    again = ResidentBase(dropping_base, 1, 64, checkpointing=True)
    (want, wanted), (found, gradient) = gradients(plain, targets), gradients(again, targets)
    assert found.metrics.loss == pytest.approx(want.metrics.loss, abs=1e-6)
    assert flat(found.logprobs) == pytest.approx(flat(want.logprobs), abs=1e-6)
    assert any(value.abs().max() > 1e-3 for value in wanted.values())
    for key, value in wanted.items():
        torch.testing.assert_close(gradient[key], value, rtol=0, atol=1e-6)
    assert flat(again.score(None, ROWS)) == pytest.approx(flat(plain.score(None, ROWS)), abs=1e-6)
    assert all(parameter.grad is None for parameter in again.model.parameters())


def test_checkpointing_keeps_a_fraction(tiny_base):
    plain, again = ResidentBase(tiny_base, 1, 512), ResidentBase(tiny_base, 1, 512, checkpointing=True)
    weights = sum(parameter.nbytes for parameter in plain.model.parameters())
    assert saved_bytes(again) < saved_bytes(plain) - weights < 20 * saved_bytes(again)


@pytest.fixture(scope="module")
def narrow(tiny_base: Path) -> ResidentBase:
    return ResidentBase(tiny_base, 1, 64, dtype=torch.bfloat16)


def test_a_bfloat16_base_trains_float32_adapters(narrow, tiny_base):
    (found, gradient), (want, wanted) = gradients(narrow), gradients(ResidentBase(tiny_base, 1, 64))
    assert {value.dtype for value in gradient.values()} == {torch.float32}
    assert {parameter.dtype for parameter in narrow.model.parameters()} == {torch.bfloat16}
    assert found.metrics.loss == pytest.approx(want.metrics.loss, rel=0.05)
    ours, theirs = (torch.cat([g.flatten() for g in gs.values()]) for gs in (gradient, wanted))
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.98


def test_small_steps_are_not_lost_in_bfloat16(narrow):
    """A step of 1e-5 vanishes beside a bfloat16 number over 0.1; in float32 it is kept."""
    adapter = moved(narrow)
    before = {key: factor.detach().clone() for key, factor in adapter.factors.items()}
    one_pass(narrow, adapter, DATA, "dapo", {})
    adapter.step(1e-5, (0.9, 0.95), 1e-8, 0.0, 1.0)
    key = next(key for key in before if key.endswith("lora_B"))
    large = before[key].abs() > 0.1
    changed = (adapter.factors[key] - before[key])[large].abs()
    assert changed.numel() > 100
    assert 0 < changed.min() <= changed.max() < 2e-5


def test_a_bfloat16_trainer_sees_exactly_what_it_exports(narrow):
    """The revision's rounded factors give the trainer's own log-probabilities, to the last bit."""
    adapter = moved(narrow)
    exported = narrow.new_adapter(4, 8.0, TARGETS, torch.Generator().manual_seed(0))
    exported.place(adapter.canonical(torch.bfloat16))
    assert any(not torch.equal(adapter.factors[key], exported.factors[key]) for key in adapter.factors)
    assert narrow.score(exported, ROWS) == narrow.score(adapter, ROWS) != narrow.score(None, ROWS)


def test_on_another_device_nothing_is_left_on_the_cpu(tiny_base, monkeypatch):
    """Tensors without data stand for a GPU's: torch refuses to mix them with the CPU's."""
    # transformers looks into positions here, which have no values now.
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda positions: None)
    base = ResidentBase(tiny_base, 1, 64, device="meta", dtype=torch.bfloat16, checkpointing=True)
    adapter = base.new_adapter(4, 8.0, TARGETS, torch.Generator().manual_seed(0))
    with base.using(adapter):
        new_T, entropy_T = base.logprobs_and_entropy([example.row for example in DATA])
        tokens = tokens_of(DATA, [1.0] * len(DATA), new_T, new_T.detach())
        loss_T, *_ = Objective.of("gspo", {"kl": 0.1, **dict.fromkeys(CORRECTIONS, True)}).terms(tokens)
        loss_T.sum().backward()
    assert entropy_T.device.type == "meta"
    assert (new_T.device.type, new_T.dtype, len(new_T)) == ("meta", torch.float32, 9)
    gradients = [factor.grad for factor in adapter.factors.values()]
    assert {(found.device.type, found.dtype) for found in gradients} == {("meta", torch.float32)}
    with pytest.raises(RuntimeError):
        new_T + torch.zeros(9)


def test_a_session_of_any_device_is_stored_on_the_cpu(narrow):
    adapter = moved(narrow)
    one_pass(narrow, adapter, DATA, "dapo", {})
    adapter.step(1e-2, (0.9, 0.95), 1e-8, 0.0, 1.0)
    stored = adapter.state_dict()
    moments = [value for state in stored["optimizer"]["state"].values() for value in state.values()]
    assert {value.device.type for value in (*stored["factors"].values(), *moments)} == {"cpu"}
    again = narrow.new_adapter(4, 8.0, TARGETS, torch.Generator())
    # As it comes back from its file: with tensors of its own.
    again.load_state_dict(copy.deepcopy(stored))
    for one in (adapter, again):
        one_pass(narrow, one, DATA, "dapo", {})
        one.step(1e-2, (0.9, 0.95), 1e-8, 0.0, 1.0)
    assert all(torch.equal(adapter.factors[key], again.factors[key]) for key in adapter.factors)


def test_the_settings_reach_the_trainer(tiny_base):
    from engine.training.service.app import load_base

    for setting, expected in ((None, False), (True, True), (False, False)):
        trainer = TrainerConfig(gradient_checkpointing=setting, threads=1)
        base = load_base(Params(trainer=trainer), tiny_base, None)
        assert (base.checkpointing, base.device.type, base.model.dtype) == (expected, "cpu", torch.float32)
    with pytest.raises(ConfigError, match=r"trainer\.device.*no GPU"):
        load_base(Params(trainer=TrainerConfig(device="cuda")), tiny_base, None)


def test_a_base_of_an_unknown_family_is_refused_before_its_weights_are_read(tmp_path):
    from transformers import GPT2Config

    GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(BaseModelError, match=r"'gpt2'.*qwen3_moe"):
        ResidentBase(tmp_path, 1, 64)


PARENT = "model.layers.0.self_attn"
MODULE = f"{PARENT}.qkv_proj"


class Layer:
    """What the slots read of vLLM's LoRA layers: stacked tensors, as `create_lora_weights` makes them."""

    def __init__(self, slots: int, rank: int, inputs: int, widths: tuple[int, ...]):
        self.lora_a_stacked = tuple(torch.zeros(slots, 1, rank, inputs) for _ in widths)
        self.lora_b_stacked = tuple(torch.zeros(slots, 1, width, rank) for width in widths)


def adapter(parts: tuple[str, ...], rank: int, seed: int) -> packed.Packed:
    generator = torch.Generator().manual_seed(seed)
    outputs = {"q_proj": 12, "k_proj": 6, "v_proj": 6}
    tensors = {}
    for part in parts:
        tensors[f"{PARENT}.{part}.lora_A"] = torch.randn(rank, 10, generator=generator)
        tensors[f"{PARENT}.{part}.lora_B"] = torch.randn(outputs[part], rank, generator=generator)
    return packed.pack(tensors, torch.float32, FUSED)


def test_slots_in_vllms_own_tensors_hold_what_ours_hold():
    """By two routes: the CPU's slots show vLLM views on ours, a GPU's slots are vLLM's tensors."""
    from engine.serving.worker.slot_copy import SlotCopyPlan
    from engine.serving.worker.slots import SlotBuffers, StackedSlots

    ours, theirs = Layer(3, 8, 10, (12, 6, 6)), Layer(3, 8, 10, (12, 6, 6))
    kinds = [SlotBuffers(ours), StackedSlots(theirs)]
    occupants = [
        (0, ("q_proj", "k_proj", "v_proj"), 8), (1, ("v_proj",), 4), (0, ("k_proj", "v_proj"), 2),
        (2, ("q_proj", "v_proj"), 8), (0, (), 0), (2, ("q_proj", "k_proj", "v_proj"), 1),
    ]  # fmt: skip
    written = {}
    for seed, (slot, parts, rank) in enumerate(occupants):
        for buffers in kinds:
            before = written.get((slot, buffers))
            if not parts:
                before.clear(slot)
                continue
            whole = adapter(parts, rank, seed)
            plan = SlotCopyPlan(whole.layout, {MODULE: buffers})
            plan.copy_to_slot(slot, plan.sources(whole.payload), before)
            written[slot, buffers] = plan
        for left, right in zip(ours.lora_a_stacked, theirs.lora_a_stacked, strict=True):
            assert torch.equal(left, right)
        for left, right in zip(ours.lora_b_stacked, theirs.lora_b_stacked, strict=True):
            assert torch.equal(left, right)
    kept = (*theirs.lora_a_stacked, *theirs.lora_b_stacked)
    assert all(tensor.squeeze(1).is_contiguous() for tensor in kept)
    assert sum(tensor[2].abs().sum() for tensor in kept) > 0
    (block, *_) = adapter(("q_proj",), 16, 0).layout.blocks
    assert "maximum of 8" in kinds[1].unsupported_reason(block, torch.float32)


def arguments(params: Params, found: MemoryPlan | None, base: Path) -> dict[str, object]:
    """The server's command line, read by vLLM's own parser."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from engine.serving.server import server_arguments

    (base / "config.json").write_text(json.dumps(QWEN3_06B))
    line = server_arguments(params, Path("params.json"), BaseInfo("base", base, "b" * 64), found)
    return vars(make_arg_parser(FlexibleArgumentParser()).parse_args(line))


def test_the_engine_gets_its_share_of_the_plan(tmp_path: Path):
    params = Params(engine=EngineConfig(max_model_len=4096, max_num_seqs=64))
    found = plan(QWEN3_06B, 80 * GIB, params.engine, params.trainer)
    given = arguments(params, found, tmp_path)
    assert given["gpu_memory_utilization"] == pytest.approx(found.gpu_memory_utilization)
    assert given["kv_cache_memory_bytes"] == found.engine_kv_cache
    assert given["dtype"] == "bfloat16"
    assert given["max_num_batched_tokens"] == 2048
    assert given["max_loras"] == 8
    assert given["trust_remote_code"] is False
    assert given["hf_token"] is None
    assert given["enforce_eager"] is False
    assert given["compilation_config"].cudagraph_mode.name == "FULL_DECODE_ONLY"
    assert given["compilation_config"].mode.name == "NONE"


def test_on_a_cpu_the_engine_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in (tiers, host):
        monkeypatch.setattr(module, "memory_bytes", lambda: 4 * GIB)
    given = arguments(Params(), None, tmp_path)
    # 20 MB each in float32 at rank 8, a quarter of 4 GiB.
    assert given["max_loras"] == GIB // slot_bytes(BaseShapes.of(QWEN3_06B), 8, 4) > 8
    # 128 sequences would need 3.8 GB; an eighth of the memory.
    assert given["kv_cache_memory_bytes"] == GIB // 2
    assert given["block_size"] == 32
    assert given["dtype"] == "float32"
    assert given["enforce_eager"] is True
    assert given["max_num_batched_tokens"] is None
    assert given["trust_remote_code"] is False


def test_the_plan_is_shown_without_a_gpu_and_a_small_one_is_refused(tmp_path):
    from typer.testing import CliRunner

    from flows.cli import app

    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(QWEN3_06B))
    file = tmp_path / "params.yaml"
    file.write_text(f"base: {{name: {tmp_path / 'base'}}}\nengine: {{max_model_len: 2048, max_num_seqs: 64}}")
    ask = ["plan", "memory", "--params", str(file), "--json", "--memory-gib"]
    roomy, small = (CliRunner().invoke(app, [*ask, size]) for size in ("80", "12"))
    assert roomy.exit_code == 0
    shown = json.loads(roomy.output)
    # Weights: 596 million numbers of two bytes, twice; keys and values: 2 x 28 layers x 1024 x 2 bytes.
    assert shown["trainer_base"] == shown["engine_base"] == 2 * 596_049_920
    assert shown["engine_kv_cache"] == (64 * 2048 + 16) * 2 * 28 * 1024 * 2
    assert 0.15 < shown["gpu_memory_utilization"] < 0.3
    assert isinstance(small.exception, ConfigError)
    assert "12.00 GiB" in str(small.exception)
    assert json.loads(small.output)["needed"] == shown["needed"]


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Params:
    """A machine that says that it has a GPU of 1 GiB, and settings with ports of their own."""
    from tests.helpers.live import free_port

    monkeypatch.setattr("engine.planning.gpu.cuda_bytes", lambda: GIB)
    ports = {name: {"port": free_port()} for name in ("engine", "trainer", "controller", "mlflow", "prefect")}
    return Params.model_validate({"state_dir": tmp_path, **ports})


def test_a_start_on_a_gpu_that_is_too_small_shows_the_plan_and_starts_nothing(small_gpu, capsys):
    from engine.services import lifecycle as services

    with pytest.raises(ConfigError, match=r"GPU.*1\.00 GiB"):
        services.start(
            small_gpu, lambda: pytest.fail("the base was built"), lambda name, text: pytest.fail(name),
            os.getpid(), ("engine", "trainer"),
        )  # fmt: skip
    assert "adapter slots" in capsys.readouterr().out
    assert {state.state for state in services.status(small_gpu)} == {"stopped"}


def test_the_trainer_itself_refuses_before_it_loads_anything(small_gpu, monkeypatch):
    from engine.training.service.app import load_trainer

    monkeypatch.setattr(
        "engine.training.service.app.ensure_base", lambda *_: pytest.fail("the base was opened")
    )
    with pytest.raises(ConfigError, match=r"GPU.*1\.00 GiB"):
        load_trainer(small_gpu)


@pytest.mark.parametrize(
    ("device", "dtype", "given"),
    [
        ("auto", "auto", ("cuda", torch.bfloat16, True)),
        ("cuda", "float32", ("cuda", torch.float32, True)),
        ("cpu", "auto", ("cpu", torch.float32, False)),
    ],
)
def test_on_a_gpu_the_trainer_takes_what_the_plan_leaves(monkeypatch, tmp_path, device, dtype, given):
    from engine.training.service import app as service

    asked: dict[str, object] = {}

    def resident(path, threads, tokens, device="cpu", dtype=torch.float32, checkpointing=False, *_, **__):
        asked["base"] = (device, dtype, checkpointing)

    monkeypatch.setattr(lora, "ResidentBase", resident)
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda share: asked.update(share=share))
    params = Params(engine=EngineConfig(dtype=dtype), trainer=TrainerConfig(device=device))
    found = plan(QWEN3_06B, 80 * GIB, params.engine, params.trainer)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    service.load_base(params, tmp_path, found)
    shares = {} if device == "cpu" else {"share": found.trainer_share}
    assert asked == {"base": given, **shares}
    assert (found.trainer_base == 0) is (device == "cpu")


def test_the_pages_plan_and_refusal_are_what_the_command_says(tmp_path):
    from typer.testing import CliRunner

    from flows.cli import app

    def ask(sequences: int):
        file = doc_settings(tmp_path, sequences)
        return CliRunner().invoke(app, ["plan", "memory", "--params", str(file), "--memory-gib", "24"])

    shown = re.search(r"```text\n(.*?)\n```", DOC, re.DOTALL)
    lines = [line.rstrip() for line in ask(48).output.rstrip().splitlines()]
    assert shown is not None
    assert lines == shown[1].splitlines()
    quoted = " ".join(line.removeprefix("> ") for line in DOC.splitlines() if line.startswith("> "))
    refused = ask(80).exception
    assert isinstance(refused, ConfigError)
    assert str(refused) == quoted


def test_every_command_of_the_page_parses(tmp_path):
    """Each line is read by the command that it names, which is not run."""
    from typer.main import get_command

    from flows.cli import app

    lines = re.findall(r"^ {4}\.venv/bin/graftwork (.+)$", DOC, re.MULTILINE)
    assert len(lines) >= 10
    for line in lines:
        command, words = get_command(app), shlex.split(line)
        while hasattr(command, "commands"):
            assert words[0] in command.commands, line
            command = command.commands[words.pop(0)]
        assert command.make_context(line, words).params["params"] == Path("real.yaml")


def test_the_page_names_tests_that_exist():
    root = ROOT
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", DOC))
    assert len(named) >= 4
    assert [name for name in sorted(named) if not (root / name).is_file()] == []
