"""Router replay: the trainer's tokens take given experts, with its own scores of them as weights."""

import base64
import io
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.base.resident import BaseInfo
from engine.catalog.catalog import migrate
from engine.errors import ConfigError
from engine.serving.server import route_arguments
from engine.settings.params import Params, Paths
from engine.settings.policies import PolicyConfig
from engine.settings.services import EngineConfig
from engine.training.model.lora import ResidentBase
from engine.training.model.packing import Example, TokenRow, pack
from engine.training.model.replay import decode, mask_unknown
from engine.training.run import prepare
from engine.training.service import protocol
from engine.training.service.examples import example_of
from tests.helpers.mla_bases import deepseek_v3
from tests.helpers.moe_bases import qwen3_moe
from tests.helpers.resident_bases import resident
from tests.helpers.training_pass import one_pass

KINDS = {"softmax": qwen3_moe, "sigmoid": deepseek_v3}
LAYERS = 3
ROWS = [
    TokenRow((7, 8, 9, 10, 11, 12), 3),
    TokenRow((20, 21, 22, 23, 24, 25, 26, 27), 5),
    TokenRow((30, 31, 32, 33), 2),
]


@pytest.fixture(scope="module")
def paths(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {kind: make(folder / kind, tiny_base) for kind, make in KINDS.items()}


@pytest.fixture(scope="module")
def bases(paths: dict[str, Path]) -> dict[str, ResidentBase]:
    return {kind: resident(path, 1, 64) for kind, path in paths.items()}


def adapter_of(base: ResidentBase):
    """An adapter with an effect: B is drawn too."""
    generator = torch.Generator().manual_seed(1)
    adapter = base.new_adapter(4, 8.0, base.shapes.targets, generator)
    with torch.no_grad():
        for key, factor in adapter.factors.items():
            if key.endswith("lora_B"):
                factor.copy_(0.05 * torch.randn(factor.shape, generator=generator))
    return adapter


def own_routes(base: ResidentBase, row: TokenRow, adapter=None) -> torch.Tensor:
    """What the trainer's routers choose by themselves, all tokens but the last: (P, L, K)."""
    _, each = base.replay.shape
    routes = torch.zeros(len(row.tokens) - 1, LAYERS, each, dtype=torch.long)
    hooks = []
    for path in base.shapes.experts:

        def keep(gate, args, output, layer: int = int(path.split(".")[2])) -> None:
            # A packed row has no last token.
            routes[:, layer] = output[2][: len(routes)]

        gate = base.model.get_submodule(f"{path.rpartition('.')[0]}.gate")
        hooks.append(gate.register_forward_hook(keep))
    base.score(adapter, [replace(row, routes=None)])
    for hook in hooks:
        hook.remove()
    return routes


def drawn_routes(base: ResidentBase, row: TokenRow, seed: int) -> torch.Tensor:
    """Other experts, each one's once for a token."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(len(row.tokens) - 1, LAYERS, base.replay.experts, generator=generator)
    return scores.argsort(-1)[..., : base.replay.shape[1]]


def examples(rows: list[TokenRow]) -> list[Example]:
    counts = [len(row.tokens) - row.start for row in rows]
    return [Example(row, (-1.0,) * n, (1.0 + n,) * n) for row, n in zip(rows, counts, strict=True)]


def gradients(base: ResidentBase, rows: list[TokenRow]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    adapter = adapter_of(base)
    found = one_pass(base, adapter, examples(rows), "importance_sampling", {})
    logprobs = torch.tensor([value for row in found.logprobs for value in row])
    return logprobs, {key: factor.grad.clone() for key, factor in adapter.factors.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainers_own_experts_change_nothing(bases, kind):
    base, adapter = bases[kind], adapter_of(bases[kind])
    routed = [replace(row, routes=own_routes(base, row, adapter)) for row in ROWS]
    want, wanted = gradients(base, ROWS)
    got, grads = gradients(base, routed)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    for key, grad in wanted.items():
        torch.testing.assert_close(grads[key], grad, rtol=1e-5, atol=1e-6)
    assert one_pass(base, adapter, examples(ROWS), "dapo", {}).metrics.out_of_route is None
    # The base, whose experts are others here and there, is not counted.
    found = one_pass(base, adapter, examples(routed), "dapo", {"kl": 0.1})
    assert found.metrics.out_of_route == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_given_experts_are_taken_with_the_trainers_own_scores(bases, kind):
    """Against a loop over tokens and experts, written from the model's paper: one layer's block."""
    base = bases[kind]
    path = next(iter(base.shapes.experts))
    block = base.model.get_submodule(path.rpartition(".")[0])
    x = torch.randn(5, base.model.config.hidden_size)
    routes = drawn_routes(base, TokenRow(tuple(range(6)), 1), 3)
    base.replay.lay([(routes, 5)], torch.device("cpu"))
    got = block(x[None])[0]
    base.replay.lay((), torch.device("cpu"))
    logits, layer = x @ block.gate.weight.T, int(path.split(".")[2])
    scores = logits.sigmoid() if kind == "sigmoid" else logits.softmax(-1)
    experts, want = block.experts.base, torch.zeros_like(x)
    for token, chosen in enumerate(routes[:, layer].tolist()):
        total = sum(scores[token, e] for e in chosen)
        for e in chosen:
            gate, up = (experts.gate_up_proj[e] @ x[token]).chunk(2)
            want[token] += (
                scores[token, e] / total * (experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up))
            )
    if kind == "sigmoid":
        want = 1.5 * want + block.shared_experts(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert (got - block(x[None])[0]).abs().max() > 0.01, "the given experts are not the router's"


@pytest.mark.parametrize("kind", KINDS)
def test_given_experts_hold_in_a_backward_that_computes_again(bases, paths, kind):
    rows = [replace(row, routes=drawn_routes(bases[kind], row, i)) for i, row in enumerate(ROWS)]
    again = resident(paths[kind], 1, 64, checkpointing=True)
    (want, wanted), (got, grads) = gradients(bases[kind], rows), gradients(again, rows)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    for key, grad in wanted.items():
        torch.testing.assert_close(grads[key], grad, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(want, gradients(bases[kind], ROWS)[0], atol=1e-3)


def test_tokens_out_of_route_are_counted_with_and_without_following(bases):
    base = bases["softmax"]
    routes = own_routes(base, ROWS[1])
    # Of the three tokens that predict the completion's, one goes elsewhere; so does one of the prompt's.
    for position in (0, 5):
        absent = next(e for e in range(base.replay.experts) if e not in routes[position, 1].tolist())
        routes[position, 1, 0] = absent
    row = replace(ROWS[1], routes=routes)
    followed = base.score(None, [row])
    strayed, known = base.replay.take()
    base.replay.follows = False
    compared = base.score(None, [row])
    base.replay.follows = True
    # Under replay the later tokens see other states, and may choose otherwise themselves.
    assert base.replay.take() == (1, 3)
    assert known == 3
    assert 1 <= strayed <= 3
    assert compared == base.score(None, [ROWS[1]]) != followed


def test_only_a_call_s_own_tokens_are_counted(bases):
    """What another session scored, or a call that failed, strayed; this session's own tokens do not."""
    base, adapter, other = bases["softmax"], adapter_of(bases["softmax"]), adapter_of(bases["softmax"])
    strays = [replace(row, routes=drawn_routes(base, row, i)) for i, row in enumerate(ROWS)]
    own = examples([replace(row, routes=own_routes(base, row, adapter)) for row in ROWS])

    def leaves_a_score() -> None:
        base.score(other, strays)

    def leaves_a_failure() -> None:
        broken = [replace(one, advantages=(math.nan,) * one.row.length) for one in examples(strays)]
        with pytest.raises(ConfigError, match="finite number"):
            one_pass(base, other, broken, "dapo", {})

    for leaves in (leaves_a_score, leaves_a_failure):
        leaves()
        found = one_pass(base, adapter, own, "dapo", {})
        assert found.metrics.out_of_route == 0.0
    assert one_pass(base, other, examples(strays), "dapo", {}).metrics.out_of_route > 0


def test_what_has_no_known_experts_is_left_out_and_counted(bases):
    base = bases["softmax"]
    whole = [replace(row, routes=own_routes(base, row)) for row in ROWS]
    kept, masked = mask_unknown(examples(whole))
    assert masked == 0
    assert kept == [replace(example, number=i) for i, example in enumerate(examples(whole))]
    part = [replace(whole[0], routes=whole[0].routes[:4]), replace(whole[1], routes=None), whole[2]]
    kept, masked = mask_unknown(examples(part))
    # Of row 0, tokens 3 and 4 are drawn from the known states 2 and 3; token 5 is not.
    assert [example.row.tokens for example in kept] == [ROWS[0].tokens[:5], ROWS[2].tokens]
    assert [len(example.advantages) for example in kept] == [2, 2] == [len(e.old_logprobs) for e in kept]
    assert masked == 1 + 3
    assert base.score(None, [kept[0].row])[0] == pytest.approx(base.score(None, [ROWS[0]])[0][:2], abs=1e-6)
    with pytest.raises(ConfigError, match=r"engine\.routed_experts.*router_replay"):
        mask_unknown(examples([replace(ROWS[0], routes=whole[0].routes[:2])]))


def test_a_pair_of_answers_is_left_out_whole(bases):
    """The second of four answers has no experts: its chosen one would be compared with another's rejected."""
    base = bases["softmax"]
    rows = [replace(row, routes=own_routes(base, row)) for row in (*ROWS, ROWS[0])]
    rows[1] = replace(rows[1], routes=None)
    kept, masked = mask_unknown(examples(rows), unit=2)
    assert [(example.number, example.row.tokens) for example in kept] == [
        (2, ROWS[2].tokens), (3, ROWS[0].tokens),
    ]  # fmt: skip
    assert masked == ROWS[0].length + ROWS[1].length


def test_a_sample_keeps_its_number_when_others_are_left_out(bases):
    base, adapter = bases["softmax"], adapter_of(bases["softmax"])
    whole = examples([replace(row, routes=own_routes(base, row)) for row in ROWS])
    whole[0] = replace(whole[0], row=replace(whole[0].row, routes=None))
    whole[2] = replace(whole[2], advantages=(math.inf,) * whole[2].row.length)
    with pytest.raises(ConfigError, match=r"sample 2\b.*finite"):
        one_pass(base, adapter, mask_unknown(whole)[0], "dapo", {})


def test_samples_share_a_prompt_whose_experts_are_alike(bases):
    base = bases["softmax"]
    other = replace(ROWS[0], tokens=(*ROWS[0].tokens[:4], 40, 41))
    routes = drawn_routes(base, ROWS[0], 6)
    apart = routes.clone()
    apart[0, 2] = torch.tensor([e for e in range(base.replay.experts) if e not in routes[0, 2].tolist()][:2])
    for second in (routes, apart):
        rows = [replace(ROWS[0], routes=routes), replace(other, routes=second)]
        stream = pack([rows], torch.device("cpu"), torch.float32)
        assert len(stream.tokens) == 5 + 5 - (3 if second is routes else 0)
        assert base.score(None, rows) == [pytest.approx(base.score(None, [row])[0], abs=1e-6) for row in rows]


def encoded(ids: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, ids)
    return base64.b64encode(file.getvalue()).decode()


def test_a_datum_carries_the_engines_own_encoding(bases):
    ids = drawn_routes(bases["softmax"], ROWS[0], 5)
    numbers = {
        "target_tokens": ROWS[0].tokens[1:], "weights": [0, 0, 1, 1, 1], "logprobs": [0, 0, -1, -1, -1],
        "advantages": [0, 0, 2, 2, 2],
    }  # fmt: skip
    datum = protocol.Datum(
        model_input=protocol.ModelInput(chunks=[protocol.EncodedText(tokens=list(ROWS[0].tokens[:-1]))]),
        loss_fn_inputs={
            name: protocol.TensorData(data=list(map(float, data))) for name, data in numbers.items()
        },
        routed_experts=encoded(ids.numpy().astype(np.uint8)),
    )
    example = example_of(protocol.Datum.model_validate_json(datum.model_dump_json()))
    assert example.row == ROWS[0]
    assert torch.equal(example.row.routes, ids)


def test_ids_that_are_none_of_this_base_are_refused(bases):
    base = bases["softmax"]
    right = drawn_routes(base, ROWS[0], 5)
    base.replay.check(right)
    for wrong in (right[:, :2], right[..., :1], right + 1 + base.replay.experts, right - 9):
        with pytest.raises(ConfigError, match="same base"):
            base.replay.check(wrong)
    for text in ("no base64!", "YWJj", encoded(np.zeros((2, 3))), encoded(np.zeros((2, 3), dtype=np.uint8))):
        with pytest.raises(ConfigError, match="routed_experts"):
            decode(text)


def test_experts_are_recorded_where_the_engine_is_asked_to_and_has_some(paths, tiny_base):
    for base, asked, recorded in (
        (paths["softmax"], True, True),
        (paths["softmax"], False, False),
        (tiny_base, True, False),
    ):
        given = route_arguments(EngineConfig(routed_experts=asked), BaseInfo("base", base, "b" * 64))
        assert given == ["--enable-return-routed-experts"] * recorded
    assert not EngineConfig().routed_experts


def test_a_run_that_would_get_no_experts_is_refused_before_its_first_rollout(paths, tmp_path):
    policy = PolicyConfig(task="addition", suite="s", verifier="exact", router_replay=True)
    migrate(Paths(tmp_path).catalog_url)

    def run(base: Path, recorded: bool) -> bool:
        params = Params(
            state_dir=tmp_path, base={"name": str(base)}, engine=EngineConfig(routed_experts=recorded),
            policies={"sums": policy},
        )  # fmt: skip
        found = prepare(params, "sums", policy, "key")
        found.close()
        return found.source.replays

    with pytest.raises(ConfigError, match=r"router_replay.*engine\.routed_experts"):
        run(paths["softmax"], False)
    assert run(paths["softmax"], True)
