"""Speculative decoding is a setting that is off, and refused where vLLM samples wrongly with it."""

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.serving.server import speculative_arguments
from engine.settings.services import EngineConfig


def test_nothing_is_drafted_unless_it_is_asked_for():
    assert speculative_arguments(EngineConfig(), None) == []


def test_a_gpu_drafts_by_ngrams():
    plan: Any = object()
    flag, config = speculative_arguments(EngineConfig(speculative=4), plan)
    assert flag == "--speculative-config"
    assert '"method": "ngram", "num_speculative_tokens": 4' in config


def test_a_cpu_refuses_drafts():
    with pytest.raises(ConfigError, match=r"engine\.speculative is 4.*CPU"):
        speculative_arguments(EngineConfig(speculative=4), None)
