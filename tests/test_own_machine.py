"""Test runs beside each other on one machine: their ports, and the lock of tests and benchmarks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import Conflict
from tests.helpers.live import PORTS, free_port
from tests.helpers.machine_lock import HELD, machine_lock
from tests.helpers.repository import ROOT

# Both processes begin with the same port, and none ends before the other has all of its own.
TAKER = """
import sys
from tests.helpers import live
live._ports = live.ports_from(7)
print(*[live.free_port() for _ in range(100)], flush=True)
sys.stdin.read()
"""


def test_two_processes_never_get_the_same_port() -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", TAKER]
    takers = [subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    taken = [port for taker in takers if taker.stdout for port in map(int, taker.stdout.readline().split())]
    for taker in takers:
        taker.communicate()
    assert len(set(taken)) == len(taken) == 200
    assert set(taken) < set(PORTS)


def test_a_process_gets_no_port_twice() -> None:
    assert len({free_port() for _ in range(100)}) == 100


HOLDER = """
import sys
from pathlib import Path
from tests.helpers.machine_lock import machine_lock
with machine_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_machines_lock_names_its_holder_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(HELD, raising=False)
    file, pipe = tmp_path / "lock", subprocess.PIPE
    command = [sys.executable, "-c", HOLDER, str(file)]
    holder = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    assert holder.stdout
    holder.stdout.readline()
    with pytest.raises(Conflict, match=rf"Process {holder.pid} \(.*{file}"), machine_lock(file, patience_s=0):
        pass
    assert HELD not in os.environ
    # However it ends.
    holder.kill()
    holder.communicate()
    with machine_lock(file, patience_s=0):
        assert f"Process {os.getpid()} " in file.read_text()
        # Nor does a child of the holder wait.
        subprocess.run(command, cwd=ROOT, input="", check=True, stdout=subprocess.DEVNULL, text=True)
    assert HELD not in os.environ
