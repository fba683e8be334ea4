"""The LoRA operations' plan of a step, without an engine."""

from types import SimpleNamespace

import pytest

from engine.serving.worker.lora_cpu import GroupedPunica


def test_a_part_of_a_step_that_fails_leaves_the_whole_plan():
    operations = GroupedPunica(16, 4, "cpu")
    operations.update_metadata(SimpleNamespace(index_mapping=(7, 0, 9, 9)), [9, 7], 2, 100)
    whole = operations.plan
    with operations.only(0, 1):
        assert operations.plan is operations.plan_of(0, 1) is not whole
    assert operations.plan is whole
    with pytest.raises(KeyError), operations.only(0, 1):
        raise KeyError
    assert operations.plan is whole is not None
