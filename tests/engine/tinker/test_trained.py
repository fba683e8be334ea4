"""The real SDK against the Tinker API on the real trainer."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
import torch

from engine.catalog.tinker_records import TinkerModel
from engine.settings.params import Params
from engine.tinker import service as app
from engine.tinker.backend import Backend
from engine.tinker.models import LOSSES
from engine.training.model.lora import ResidentBase
from tests.helpers.summed_reference import logprobs_of, peft_of, written
from tests.helpers.tinker_service import Served, tinker_served
from tests.helpers.trainers import Trainers

TOKENS = [5, 9, 17, 30, 4, 8, 12, 21]


@pytest.fixture(scope="module")
def base(tiny_base: Path) -> ResidentBase:
    return ResidentBase(tiny_base, threads=1, microbatch_tokens=4096)


@pytest.fixture
def served(base: ResidentBase, tmp_path: Path) -> Iterator[Served]:
    made = Trainers(base, tmp_path)
    live = made.start()
    params = Params.model_validate({"state_dir": tmp_path, "tinker": {"enabled": True}})
    with tinker_served(tmp_path, lambda catalog: Backend(params, catalog)) as found:
        found.models.backend.trainer = live.client
        found.trainers = made
        yield found
    made.stop()


@pytest.fixture
def client(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[tinker.ServiceClient]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with tinker.ServiceClient(base_url=served.url, api_key=served.key) as found:
        yield found


def trained(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client("tiny-dense", rank=8, seed=3).result()


def datum(weights: list[float]) -> tinker.Datum:
    inputs = {
        "target_tokens": tinker.TensorData(data=TOKENS[1:], dtype="int64", shape=[7]),
        "weights": tinker.TensorData(data=weights, dtype="float32", shape=[7]),
    }
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)


def step(model: tinker.TrainingClient, data: list[tinker.Datum]) -> float:
    output = model.forward_backward(data, "cross_entropy")
    model.optim_step(tinker.AdamParams(learning_rate=3e-2)).result()
    return output.result().metrics["loss:sum"]


@pytest.mark.long
def test_a_model_learns_and_goes_on_from_its_state(served: Served, client: tinker.ServiceClient) -> None:
    model, data = trained(client), [datum([0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 2.5])]
    losses = [step(model, data) for _ in range(4)]
    assert losses[3] < losses[0] - 1
    path = model.save_state("four").result().path
    revision = model.save_weights_for_sampler("final").result().path
    want = [step(model, data) for _ in range(2)]
    # With the moments the next two steps are the same, without them the second is another one.
    again = client.create_training_client_from_state_with_optimizer(path).result()
    assert [step(again, data) for _ in range(2)] == want
    plain = client.create_training_client_from_state(path).result()
    other = [step(plain, data) for _ in range(2)]
    assert other[0] == want[0]
    assert other[1] != want[1]
    # The checkpoint for samplers is a revision of the catalog, with its probe.
    row = served.catalog.tinker.checkpoint("acme", model.model_id, "sampler_weights", "final")
    policy = served.catalog.tinker.find(TinkerModel, "acme", model.model_id).policy
    assert row
    found = served.catalog.revisions.get(policy, row.stored)
    assert (found.state, found.owner, found.step, found.rank) == ("exported", "acme", 4, 8)
    assert revision.endswith("/sampler_weights/final")
    client.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError):
        client.create_training_client_from_state(path).result()


def test_a_custom_cross_entropy_steps_as_the_built_in_one(client: tinker.ServiceClient) -> None:
    weights = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 2.5])
    data = [datum(weights.tolist())]

    def loss(
        _data: list[tinker.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        return -(weights * logprobs[0]).sum(), {}

    mine, theirs = (
        client.create_lora_training_client("tiny-dense", rank=8, seed=3).result() for _ in range(2)
    )
    scored = []
    for model, custom in ((mine, True), (theirs, False)):
        for _ in range(2):
            if custom:
                model.forward_backward_custom(data, loss).result()
            else:
                model.forward_backward(data, "cross_entropy").result()
            model.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        output = model.forward(data, "cross_entropy").result()
        scored.append(torch.tensor(output.loss_fn_outputs[0]["logprobs"].data))
    assert scored[0].shape == (7,)
    torch.testing.assert_close(scored[0], scored[1], atol=1e-5, rtol=0)


def test_faults_of_a_datum_are_told_by_the_trainer(client: tinker.ServiceClient) -> None:
    model = trained(client)
    bad = tinker.Datum(model_input=tinker.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs={})
    with pytest.raises(tinker.RequestFailedError, match="no target_tokens"):
        model.forward_backward([bad], "cross_entropy").result()
    beyond = datum([1.0] * 7)
    beyond.loss_fn_inputs["target_tokens"] = tinker.TensorData(data=[1 << 20] * 7, dtype="int64", shape=[7])
    with pytest.raises(tinker.RequestFailedError, match="1048576"):
        model.forward_backward([beyond], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="around 1"):
        model.forward_backward([datum([1.0] * 7)], "ppo", {"clip_low_threshold": 2.0}).result()
    assert model.forward([datum([1.0] * 7)], "cross_entropy").result().metrics["loss:sum"] > 0


# Beside two samples of one prompt.
INPUTS = ((5, 9, 30, 31, 32, 40), (5, 9, 30, 61, 62), (7,), (11, 12, 13, 14, 15, 16, 17, 18, 19))
# So large an epsilon that a step follows the gradient, not its sign, which rounding decides near 0.
SMOOTH = tinker.AdamParams(learning_rate=0.1, beta1=0.9, beta2=0.95, eps=1.0)
BOUNDS = {"cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 1.3},
          "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}}  # fmt: skip


def columns(loss: str) -> list[dict[str, list[float]]]:
    """Inputs of every datum: targets that are not the next tokens, real weights, samples a little beside."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for tokens in INPUTS:
        drawn = {
            "target_tokens": torch.randint(5, 300, (len(tokens),), generator=generator).float(),
            "weights": torch.randn(len(tokens), generator=generator),
            "advantages": torch.randn(len(tokens), generator=generator),
            "logprobs": -5.5 + 0.7 * torch.randn(len(tokens), generator=generator),
            "sequence_ratio_mask": torch.ones(len(tokens)),
        }
        read = {"cross_entropy": ("weights",), "gspo": ("logprobs", "advantages", "sequence_ratio_mask")}
        names = ("target_tokens", *read.get(loss, ("logprobs", "advantages")))
        made.append({name: drawn[name].tolist() for name in names})
    return made


def sent(given: list[dict[str, list[float]]]) -> list[tinker.Datum]:
    def tensor(name: str, values: list[float]) -> tinker.TensorData:
        kind = "int64" if name == "target_tokens" else "float32"
        numbers = list(map(int, values)) if kind == "int64" else values
        return tinker.TensorData(data=numbers, dtype=kind, shape=[len(values)])

    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(list(tokens)),
            loss_fn_inputs={name: tensor(name, values) for name, values in one.items()},
        )
        for tokens, one in zip(INPUTS, given, strict=True)
    ]


def factors(served: Served, model: tinker.TrainingClient) -> dict[str, torch.Tensor]:
    """The model's adapter in the trainer."""
    found = served.catalog.tinker.find(TinkerModel, "acme", model.model_id)
    assert found
    session = served.trainers.now.trainer.sessions.find(found.policy).session
    return {key: factor.detach().clone() for key, factor in session.adapter.factors.items()}


def two_steps(model: tinker.TrainingClient, loss: str) -> tinker.ForwardBackwardOutput:
    for _ in range(2):
        output = model.forward_backward(sent(columns(loss)), loss, BOUNDS.get(loss))
        model.optim_step(SMOOTH).result()
    return output.result()


@pytest.mark.long
@pytest.mark.parametrize("loss", LOSSES)
def test_steps_are_adamw_s_on_peft_s_model(
    served: Served, client: tinker.ServiceClient, tiny_base: Path, loss: str
) -> None:
    model = client.create_lora_training_client("tiny-dense", rank=8, seed=0).result()
    before = factors(served, model)
    targets = sorted({key.rpartition(".lora_")[0].rpartition(".")[2] for key in before})
    peft, theirs = peft_of(tiny_base, before, 8, 32.0, targets)
    optimizer = torch.optim.AdamW(theirs.values(), lr=0.1, betas=(0.9, 0.95), eps=1.0, weight_decay=0.0)
    for _ in range(2):
        given = columns(loss)
        scored = [
            logprobs_of(peft, tokens, one["target_tokens"]) for tokens, one in zip(INPUTS, given, strict=True)
        ]
        want = sum(written(loss, p, one) for p, one in zip(scored, given, strict=True))
        optimizer.zero_grad()
        want.backward()
        optimizer.step()
    output = two_steps(model, loss)
    assert output.metrics["loss:sum"] == pytest.approx(want.item(), rel=1e-4, abs=1e-4)
    for row, p in zip(output.loss_fn_outputs, scored, strict=True):
        assert row["logprobs"].data == pytest.approx(p.tolist(), abs=1e-4)
    after = factors(served, model)
    assert max(float((after[key] - before[key]).abs().max()) for key in before) > 1e-3
    for key, factor in after.items():
        torch.testing.assert_close(factor, theirs[key].detach(), atol=1e-5, rtol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("loss", ["cross_entropy", "ppo"])
def test_chunks_of_one_and_of_all_learn_the_same(
    served: Served, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    found = {}
    for length in (1, 1024):
        monkeypatch.setattr(app, "CLIENT_CONFIG", {**app.CLIENT_CONFIG, "fwdbwd_max_chunk_len": length})
        with tinker.ServiceClient(base_url=served.url, api_key=served.key) as client:
            model = client.create_lora_training_client("tiny-dense", rank=8, seed=4).result()
            served.twice.seen.clear()
            before = factors(served, model)
            output = two_steps(model, loss)
            chunks = sum(path.endswith("forward_backward") for path, *_ in served.twice.seen)
            assert chunks == (2 * len(INPUTS) if length == 1 else 2)
            learned = {key: factor - before[key] for key, factor in factors(served, model).items()}
            found[length] = output.metrics["loss:sum"], learned
    assert found[1][0] == pytest.approx(found[1024][0], rel=1e-5)
    for key, change in found[1][1].items():
        # Single values may be sums that cancel, so the whole factor's rounding is compared.
        assert (change - found[1024][1][key]).norm() <= 1e-4 * change.norm() > 0, key


def test_a_trainer_that_restarts_between_gradients_and_step_is_told(
    served: Served, client: tinker.ServiceClient
) -> None:
    model, data = trained(client), [datum([1.0] * 7)]
    step(model, data)
    path = model.save_state("one").result().path
    model.forward_backward(data, "cross_entropy").result()
    served.models.backend.trainer = served.trainers.start().client
    with pytest.raises(tinker.RequestFailedError):
        model.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    # Its next call says that gradients were lost; a model from its checkpoint goes on.
    with pytest.raises(tinker.RequestFailedError, match=r"Gradients.*restarted"):
        model.forward_backward(data, "cross_entropy").result()
    again = client.create_training_client_from_state_with_optimizer(path).result()
    assert step(again, data) > 0
    # Without gradients under way, a restart is not noticed.
    served.models.backend.trainer = served.trainers.start().client
    assert step(again, data) > 0
