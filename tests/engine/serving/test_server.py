"""The engine's process before vLLM starts: how the machine's cores are shared out."""

import logging
import os
from pathlib import Path
from unittest import mock

import pytest
from vllm.utils.cpu_resource_utils import parse_id_list

from engine.errors import ConfigError
from engine.serving import NO_TRITON
from engine.serving.server import cores_of_ranks, set_environment
from engine.settings.params import Params
from engine.settings.services import EngineConfig


@pytest.mark.parametrize(
    ("cores", "parts"),
    [
        (range(16), [range(8), range(8, 16)]),
        # A container may lend any cores, and a number of them that ranks do not divide.
        ([2, 3, 5, 8, 9], [[2, 3], [5, 8, 9]]),
        ([4, 6, 7], [[4], [6], [7]]),
    ],
)
def test_ranks_share_out_all_cores(cores, parts):
    text = cores_of_ranks(list(cores), len(parts))
    # As vLLM reads it.
    assert [parse_id_list(part) for part in text.split("|")] == [list(part) for part in parts]


def test_one_rank_is_left_to_the_scheduler():
    assert cores_of_ranks([0, 1], 1) == "nobind"


def test_more_ranks_than_cores_are_refused():
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel is 3.*2 cores"):
        cores_of_ranks([0, 1], 3)


@mock.patch.dict(os.environ)
def test_on_cuda_ranks_need_no_cores_of_their_own(monkeypatch):
    """Four ranks on a machine of two cores: refused on its CPU, and nothing that concerns its GPUs."""
    os.environ.pop("VLLM_CPU_OMP_THREADS_BIND", None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    params = Params(engine=EngineConfig(tensor_parallel=4))
    monkeypatch.setattr("engine.serving.server.cuda_bytes", lambda: None)
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel is 4"):
        set_environment(params)
    monkeypatch.setattr("engine.serving.server.cuda_bytes", lambda: 80 << 30)
    set_environment(params)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ


def test_only_the_warning_about_tritons_cpu_backend_is_left_out() -> None:
    from vllm.triton_utils import importing

    logger = logging.getLogger(importing.__name__)

    def passes(message: str) -> bool:
        record = logger.makeRecord(logger.name, logging.WARNING, __file__, 1, message, (), None)
        return bool(logger.filter(record))

    assert NO_TRITON in Path(importing.__file__).read_text()
    assert not passes(f"{NO_TRITON} Disabling Triton.")
    assert passes("Another warning.")
