"""Imports of large libraries leave out what is not used, and garbage collection, and neither stays out."""

import gc
import subprocess
import sys

import pytest

from engine.errors import ConfigError
from engine.lean_imports import UNUSED, lean_imports


class Ring:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.own = self


def test_what_is_made_meanwhile_is_left_out_of_later_collections() -> None:
    frozen = gc.get_freeze_count()
    with lean_imports():
        assert not gc.isenabled()
        rings = [Ring() for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(rings)
    assert not any(isinstance(one, Ring) for one in gc.get_objects())


def test_all_is_as_before_after_an_import_that_fails() -> None:
    known = {name: sys.modules.get(name) for name in UNUSED}
    with pytest.raises(ConfigError), lean_imports():
        raise ConfigError("The module is not there.")
    assert gc.isenabled()
    assert {name: sys.modules.get(name) for name in UNUSED} == known


@pytest.mark.long
def test_transformers_goes_without_them_and_who_asks_later_gets_them() -> None:
    program = f"""
import sys
from engine.lean_imports import lean_imports
with lean_imports():
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.generation import candidate_generator
print([name for name in {UNUSED} if name in sys.modules])
import pandas, scipy, sklearn
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
