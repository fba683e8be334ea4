"""Packed sequences: the numbers of transformers' own forward row by row, however they are packed."""

import pytest
import torch

from engine.training.model.lora import ResidentBase
from engine.training.model.packing import Example, TokenRow, can_pack, microbatches, pack
from tests.helpers.mla_bases import deepseek_v3
from tests.helpers.moe_bases import glm4_moe, qwen3_moe
from tests.helpers.packed_rows import ROWS
from tests.helpers.resident_bases import resident
from tests.helpers.training_pass import one_pass

KINDS = ("dense", "moe", "glm", "mla")


# Two groups, in turns; a completion of one token; a row alone; a prompt of one token; a row twice.


@pytest.fixture(scope="module")
def paths(tiny_base, tmp_path_factory):
    root = tmp_path_factory.mktemp("packed")
    makers = {"moe": qwen3_moe, "glm": glm4_moe, "mla": deepseek_v3}
    return {"dense": tiny_base} | {kind: make(root / kind, tiny_base) for kind, make in makers.items()}


@pytest.fixture(scope="module")
def bases(paths):
    return {kind: resident(paths[kind], 1, 4096) for kind in KINDS}


def moved(base: ResidentBase, seed: int = 1, rank: int = 4):
    """An adapter on every projection whose B is not zero any more."""
    generator = torch.Generator().manual_seed(seed)
    adapter = base.new_adapter(rank, 2.0 * rank, base.shapes.targets, generator)
    with torch.no_grad():
        for key, factor in adapter.factors.items():
            if key.endswith("lora_B"):
                factor.copy_(torch.randn(factor.shape, generator=generator) * 0.05)
    return adapter


def data(seed: int = 2) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)
    counts = [len(row.tokens) - row.start for row in ROWS]
    advantages = torch.randn(len(ROWS), generator=generator).tolist()
    return [
        Example(row, (-5.0,) * count, (advantage,) * count)
        for row, count, advantage in zip(ROWS, counts, advantages, strict=True)
    ]


def gradients(base: ResidentBase, adapter) -> dict[str, torch.Tensor]:
    one_pass(base, adapter, data(), "importance_sampling", {})
    found = {key: factor.grad.clone() for key, factor in adapter.factors.items()}
    adapter.clear_gradients()
    return found


def assert_close(found, wanted, tolerance: float = 1e-6) -> None:
    """Within a share of the largest gradient of each factor: sums of another order, in float32."""
    for key, value in wanted.items():
        assert (found[key] - value).abs().max() <= tolerance * max(1.0, value.abs().max()), key
    assert max(value.abs().max() for value in wanted.values()) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_those_of_transformers_row_by_row(bases, paths, kind):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(paths[kind], experts_implementation="eager").eval()
    assert bases[kind].packs
    found = bases[kind].logprobs(ROWS).tolist()
    wanted = []
    with torch.no_grad():
        for row in ROWS:
            logprobs = model(torch.tensor([row.tokens])).logits.log_softmax(-1)[0]
            wanted += [logprobs[i - 1, row.tokens[i]].item() for i in range(row.start, len(row.tokens))]
    assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_do_not_depend_on_the_packing_and_are_those_of_padded_rows(bases, kind, monkeypatch):
    base = bases[kind]
    adapter = moved(base)
    wanted = gradients(base, adapter)
    for budget in (9, 20):
        monkeypatch.setattr(base, "microbatch_tokens", budget)
        assert len(base.microbatches(ROWS)) > 1
        assert_close(gradients(base, adapter), wanted)
    monkeypatch.setattr(base, "packs", False)
    monkeypatch.setattr(base, "microbatch_tokens", 4096)
    assert_close(gradients(base, adapter), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_computes_the_packed_layers_again(bases, paths, kind):
    again = resident(paths[kind], 1, 4096, checkpointing=True)
    assert_close(gradients(again, moved(again)), gradients(bases[kind], moved(bases[kind])))


def test_a_prompt_is_in_the_stream_once_and_buckets_split_by_length():
    stream = pack([ROWS], torch.device("cpu"), torch.float32)
    prompts = {row.prompt for row in ROWS}
    own = sum(len(row.tokens) - row.start - 1 for row in ROWS)
    assert len(stream.tokens) == sum(map(len, prompts)) + own == stream.counts[0]
    assert [tuple(row.tokens[row.start :]) for row in ROWS] == [
        tuple(part.tolist()) for part in stream.chosen.split([len(row.tokens) - row.start for row in ROWS])
    ]
    short, long = [TokenRow((1, 2, 3), 1)] * 30, [TokenRow((4, *range(300)), 1)] * 2
    layout = pack([[*short, *long]], torch.device("cpu"), torch.float32).layout
    assert len({bucket.keys for bucket in layout.buckets}) > 1
    assert len(layout.queries) < 1.5 * 300 * 3


def test_parts_share_no_prompt():
    stream = pack([ROWS[:2], ROWS[:2]], torch.device("cpu"), torch.float32)
    half = len(stream.tokens) // 2
    assert stream.counts == (half, half)
    assert torch.equal(stream.before[4:], stream.before[:4] + half)


def test_microbatches_hold_a_budget_and_keep_units_and_groups_together():
    for budget, unit in ((9, 1), (16, 1), (16, 2), (40, 3), (1000, 1)):
        batches = microbatches(ROWS, budget, unit)
        assert sorted(i for batch in batches for i in batch) == list(range(len(ROWS)))
        for batch in batches:
            size = len(pack([[ROWS[i] for i in batch]], torch.device("cpu"), torch.float32).tokens)
            assert size <= budget or len(batch) <= unit
        for begin in range(0, len(ROWS), unit):
            members = set(range(begin, min(begin + unit, len(ROWS))))
            assert any(members <= set(batch) for batch in batches)
    assert any({0, 1, 2, 5} <= set(batch) for batch in microbatches(ROWS, 16))
    assert microbatches(ROWS, 1000) == [list(range(len(ROWS)))]
    assert microbatches(ROWS[:2], 9) == [[0, 1]]
    assert microbatches(ROWS[:2], 9, shared=False) == [[0], [1]]


def test_attention_of_another_kind_gets_padded_rows(tmp_path):
    from transformers import MistralConfig, Qwen3Config

    assert can_pack(Qwen3Config())
    assert can_pack(MistralConfig(sliding_window=None))
    assert not can_pack(MistralConfig(sliding_window=128))
    assert not can_pack(Qwen3Config(use_sliding_window=True, sliding_window=4, max_window_layers=1))


def test_a_windowed_model_is_still_right(tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(3)
    config = MistralConfig(
        vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=3, initializer_range=0.2,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    base = resident(tmp_path, 1, 4096)
    assert not base.packs
    wanted = []
    with torch.no_grad():
        for row in ROWS:
            logprobs = model(torch.tensor([row.tokens])).logits.log_softmax(-1)[0]
            wanted += [logprobs[i - 1, row.tokens[i]].item() for i in range(row.start, len(row.tokens))]
    assert base.logprobs(ROWS).tolist() == pytest.approx(wanted, abs=1e-5)
    for row in base.greedy(None, [row.prompt for row in ROWS], (), 4):
        best = model(torch.tensor([row.tokens])).logits[0].argmax(-1).tolist()
        assert tuple(best[row.start - 1 : -1]) == row.tokens[row.start :]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_completions_together_are_those_of_transformers_one_by_one(bases, paths, kind):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(paths[kind], experts_implementation="eager").eval()
    prompts = [row.prompt for row in ROWS[2:8]]
    found = bases[kind].greedy(None, prompts, (), 4)
    end = found[0].tokens[-1]
    for prompt, row in zip(prompts, found, strict=True):
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(4):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert row == TokenRow(tuple(tokens), len(prompt))
    ended = bases[kind].greedy(None, prompts[:1], (end,), 9)[0].tokens
    assert ended.index(end, len(prompts[0])) == len(ended) - 1


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_the_most_likely_of_the_packed_forward(bases, paths, kind, monkeypatch):
    base, calls = bases[kind], []
    adapter, prompts = moved(base), [row.prompt for row in ROWS]
    found = base.greedy(adapter, prompts, (), 5)
    with torch.no_grad(), base.using(adapter):
        hidden_TH, chosen_T = base.hidden(found)
        best_T = base.model.get_output_embeddings()(hidden_TH).argmax(dim=1)
    assert best_T.tolist() == chosen_T.tolist()
    assert found != base.greedy(None, prompts, (), 5)
    # In parts that the budget allows, and with layers that a backward would compute again.
    small = resident(paths[kind], 1, 40, checkpointing=True)
    generate = small.model.generate
    monkeypatch.setattr(
        small.model, "generate", lambda ids, **more: calls.append(ids) or generate(ids, **more)
    )
    held = small.hold(adapter.canonical(torch.float32))
    assert small.greedy(held, prompts, (), 5) == found
    assert len(calls) > 1
    # Streams and checkpoints are on again.
    assert small.model.model.layers[0].training
    assert small.score(held, found) == [pytest.approx(row, abs=1e-4) for row in base.score(adapter, found)]
