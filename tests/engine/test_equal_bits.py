"""A row's bits do not depend on the rows beside it, as docs/reproduce.md promises; who asks MKL for it."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.settings.params import Params
from engine.settings.reproducible import STRICT_VALUES, VALUE, VARIABLE, equal_bits
from tests.helpers.repository import ROOT

# By how much of the largest value a row may be off where bits are not promised. Seen: 1e-6 and 6e-4.
ROUNDING = {"float32": 1e-5, "bfloat16": 2**-7}


def products(dtype: str, *options: str, environment: dict[str, str]) -> dict[str, Any]:
    """Return what tests/helpers/equal_bits.py finds in a process with these variables."""
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "equal_bits.py"), dtype, *options]
    # Threads that wait sleep, as in the engine: beside other processes two threads would starve each other.
    environment |= {"OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(dtype: str) -> None:
    """1 to 96 rows in a larger batch, each number in float32; forward, both gradients, one and two threads.

    Bits are promised in float32 where MKL has strict kernels for the CPU. In bfloat16 oneDNN computes, which
    has no such mode; there, and on other CPUs, a row differs by rounding alone.
    """
    found = products(dtype, environment=os.environ | equal_bits(os.environ))
    mkl, cases = found["mkl"], found["cases"]
    assert mkl["asked"] == mkl["there"]
    print(f"{dtype}, {mkl}:", *(case for case in cases if case["differ"]), sep="\n  ")
    assert {case["threads"] for case in cases} == {1, 2}
    assert max(case["far"] for case in cases) <= ROUNDING[dtype]
    if dtype == "float32" and mkl["kept"]:
        assert [case for case in cases if case["differ"]] == []


@pytest.mark.long
def test_what_the_variable_changes_on_this_cpu(record_property: Any) -> None:
    """Reported, not asserted: a CPU may treat rows alike by itself."""
    plain = {name: value for name, value in os.environ.items() if name != VARIABLE}
    found = products("float32", "--quick", environment=plain)
    assert not found["mkl"]["asked"]
    without = {case["part"]: case["differ"] for case in found["cases"]}
    record_property("rows that differ without it", without)
    print(f"Without {VARIABLE} a row's bits differ at these numbers of rows: {without}.")


def test_a_strict_value_of_the_users_own_stays() -> None:
    assert equal_bits({VARIABLE: "AVX2,STRICT"}) == {VARIABLE: "AVX2,STRICT"}
    assert VALUE in STRICT_VALUES


@pytest.mark.parametrize("value", ["AVX2", "AUTO", "COMPATIBLE,STRICT", "auto,strict"])
def test_a_value_that_breaks_equal_bits_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.services.lifecycle import environment

    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ConfigError, match=f"MKL_CBWR.*'{value}'"):
        environment(Params())


def test_it_is_too_late_once_torch_is_there() -> None:
    assert "torch" in sys.modules
    with pytest.raises(AssertionError, match=r"torch.*MKL_CBWR"):
        equal_bits({})


# It starts none, but names them.
@pytest.mark.services
def test_services_set_it_before_they_import_torch() -> None:
    """Each process on its own, as one starts them by hand; the flows and commands by `enter`."""
    code = """
import os, sys
import engine.serving.server, engine.training.service.app as app, flows.cli
from flows.entry import enter
from pathlib import Path
app.load_trainer = lambda *given: sys.exit("trainer " + os.environ["MKL_CBWR"] + str("torch" in sys.modules))
assert "torch" not in sys.modules
step, sys.argv = sys.argv[1], ["app", "--params", "params.yaml"]
if step == "trainer":
    app.main()
params = enter(Path("params.yaml")) if step == "flows" else engine.serving.server.load_params("params.yaml")
if step == "engine":
    engine.serving.server.set_environment(params)
sys.exit(step + " " + os.environ["MKL_CBWR"] + str(step != "engine" and "torch" in sys.modules))
"""
    plain = {name: value for name, value in os.environ.items() if name != VARIABLE}
    for step in ("trainer", "engine", "flows"):
        run = subprocess.run(
            [sys.executable, "-c", code, step],
            env=plain,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert run.stderr.strip().endswith(f"{step} {VALUE}False")
