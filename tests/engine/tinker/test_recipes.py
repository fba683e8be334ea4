"""Unmodified recipes of tinker-cookbook on engine, trainer and Tinker API, as `graftwork up` starts them.

Hours before `make test-all` runs these, test_face.py and test_trained.py check the same calls one by one.
"""

import math
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tinker

from tests.helpers.tinker_installation import MOST_TOKENS, Installation, installation, write_sums

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
SUPERVISED = {"dataset": "sums.jsonl", "batch_size": 32, "lora_rank": 32, "eval_every": 0}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    pytest.importorskip("tinker_cookbook", reason="make cookbook installs it")
    with installation(tmp_path_factory.mktemp("recipes") / "state") as found:
        write_sums(found.home / "sums.jsonl", 1280)
        yield found


@pytest.fixture(scope="module")
def supervised(live: Installation) -> list[dict[str, Any]]:
    """The metrics of a run of chat_sl, which saves often."""
    return live.recipe(
        "chat_sl.train",
        "sl",
        learning_rate=5e-3,
        num_epochs=2,
        save_every=20,
        rolling_save_every=10,
        **SUPERVISED,
    )


def test_a_supervised_recipe_lowers_its_loss(live: Installation, supervised: list[dict[str, Any]]) -> None:
    losses = [row["train_mean_nll"] for row in supervised if "train_mean_nll" in row]
    assert len(losses) == 80
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3]), losses
    # Rolling checkpoints are deleted when the next one is there, the others stay.
    with live.client() as client:
        rest = client.create_rest_client()
        (final,) = [row for row in live.checkpoints("sl") if row["name"] == "final"]
        model = final["state_path"].removeprefix("tinker://").partition("/")[0]
        left = [row.checkpoint_id for row in rest.list_checkpoints(model).result().checkpoints]
    kept = ["000020", "000040", "000060", "final"]
    assert {row["name"] for row in live.checkpoints("sl")} == {"000010", "000030", "000050", "000070", *kept}
    assert left == [f"{kind}/{name}" for name in kept for kind in ("weights", "sampler_weights")]


def test_sampler_and_trainer_agree(live: Installation, supervised: list[dict[str, Any]]) -> None:
    (final,) = [row for row in live.checkpoints("sl") if row["name"] == "final"]
    with live.client() as client:
        sampler = client.create_sampling_client(model_path=final["sampler_path"]).result()
        model = client.create_training_client_from_state(final["state_path"]).result()
        tokens = [5, 9, 17, 30, 4, 8, 12, 21, 40, 33, 7, 61, 5, 9]
        told = sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()
        inputs = {
            "target_tokens": tinker.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1]),
            "weights": tinker.TensorData(
                data=[1.0] * (len(tokens) - 1), dtype="float32", shape=[len(tokens) - 1]
            ),
        }
        datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        output = model.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    assert told[0] is None
    assert list(told[1:]) == pytest.approx(list(output), abs=1e-3)


def test_a_recipe_of_reinforcement_learning_raises_reward_and_accuracy(
    live: Installation, supervised: list[dict[str, Any]]
) -> None:
    # A start that has much to learn: what the end of that run answers, this model hardly improves on.
    (start,) = [row for row in live.checkpoints("sl") if row["name"] == "000020"]
    with live.client() as client:
        before = live.accuracy(client.create_sampling_client(model_path=start["sampler_path"]).result())
    rows = live.recipe(
        "math_rl.train",
        "rl",
        env="arithmetic",
        loss_fn="importance_sampling",
        load_checkpoint_path=start["state_path"],
        groups_per_batch=32,
        group_size=8,
        max_tokens=MOST_TOKENS,
        learning_rate=1e-3,
        max_steps=80,
        eval_every=0,
    )
    (last,) = [row for row in live.checkpoints("rl") if row["name"] == "final"]
    with live.client() as client:
        after = live.accuracy(client.create_sampling_client(model_path=last["sampler_path"]).result())
    right = [row["env/all/correct"] for row in rows if "env/all/correct" in row]
    rewards = [row["env/all/reward/total"] for row in rows if "env/all/reward/total" in row]
    first_kl = next(row["optim/kl_sample_train_v2"] for row in rows if "optim/kl_sample_train_v2" in row)
    print(f"held-out {before:.3f} to {after:.3f}; correct {right}; reward {rewards}; first KL {first_kl:.2g}")
    assert abs(first_kl) < 1e-6
    assert after >= before + 0.2
    assert sum(rewards[-3:]) / 3 >= sum(rewards[:3]) / 3 + 0.2
    assert math.isfinite(sum(rewards))


def test_a_recipe_goes_on_after_face_and_trainer_were_killed(live: Installation) -> None:
    arguments = {**SUPERVISED, "learning_rate": 1e-3, "save_every": 5}
    process = live.start_recipe("chat_sl.train", "killed", **arguments)
    until = time.monotonic() + 600
    while len(live.metrics("killed")) < 12:
        assert process.poll() is None, (live.home / "killed.out").read_text()[-4000:]
        assert time.monotonic() < until
        time.sleep(0.1)
    live.kill("tinker", "trainer")
    # It ends by itself, as its client's requests fail; it is run again as a person would.
    assert process.wait(600) != 0
    begun = live.checkpoints("killed")
    # The same checkpoint, from which a run goes on that nobody kills.
    shutil.copytree(live.home / "killed", live.home / "spared")
    rows = live.recipe("chat_sl.train", "killed", **arguments)
    assert [row["step"] for row in rows if "train_mean_nll" in row] == list(range(40))
    at = begun[-1]["batch"]
    assert 10 <= at < 40
    (final,) = [row for row in live.checkpoints("killed") if row["name"] == "final"]
    # The trainer has applied every call once. The recipe sends a batch ahead, so its save at step 10 comes
    # after the calls of steps 0 to 11, and it names batch 10 as the next one.
    assert live.steps_in(begun[-1]["state_path"]) == at + 2
    assert live.steps_in(final["state_path"]) == 40 - at
    spared = live.recipe("chat_sl.train", "spared", **arguments)
    losses, others = ([row["train_mean_nll"] for row in found[at:]] for found in (rows, spared))
    assert losses == pytest.approx(others, abs=1e-5)
