"""A training step is recorded once, whenever its flow ends."""

import pytest
import yaml

from engine.settings.params import load_params
from engine.training import loop
from engine.training.service.protocol import AdamParams
from tests.helpers.live import eventually
from tests.helpers.operated import Operated

pytestmark = [pytest.mark.heavy(minutes=9), pytest.mark.timeout(600)]
POLICY = "unrecorded"


def test_a_step_that_was_stored_just_before_its_flow_died_is_recorded_by_the_next_one(
    people: Operated,
) -> None:
    recipe = {"task": "addition", "contract": "terse", "suite": "addition-terse", "steps": 2, "groups": 8}
    settings = people.state / "unrecorded.yaml"
    settings.write_text(yaml.safe_dump(people.data | {"policies": {POLICY: recipe}}))
    params = load_params(settings)

    def recorded() -> list[int]:
        rows = people.controller.get(f"/ledger/train_steps?policy={POLICY}").raise_for_status().json()
        return [row["step"] for row in rows]

    run = loop.prepare(params, POLICY, params.policy(POLICY), people.key)
    row = {"policy": POLICY, "session": run.line.session, "reward": 0.5, "handed": None}
    run.client.optim_step(loop.open_session(run), AdamParams(), record=row, skip=True)
    assert recorded() == []
    for _ in range(2):
        assert loop.open_session(run).step == 1
    run.close()
    assert eventually(recorded)
    assert recorded() == [1]
