"""A benchmark that a signal ends leaves no process behind: not its servers, and nothing that they started."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.base.toys.recipes import RECIPES
from tests.helpers.bench_files import BENCH
from tests.helpers.live import eventually, left_behind

# A server with a child in a session of its own: its parent's signals and its group's do not reach it.
SERVER = """
import subprocess, sys, time
command = [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]]
subprocess.Popen(command, start_new_session=True)
time.sleep(600)
"""
# What benchmarks start, by the helpers with which they start it.
STOCK_SERVER = """
from tests.helpers.live import StockServer
StockServer(Path(root), "float32", program=("-c", sys.argv[2], root))
"""
SERVER_OF_OURS = """
from tests.helpers.live import start_reaped
start_reaped(["-c", sys.argv[2], root], subprocess.DEVNULL)
"""
LOAD_CLIENT = """
import _traffic
_traffic.__file__ = f"{root}/_traffic.py"
Path(root, "_client.py").write_text(sys.argv[2])
_traffic.Client().__enter__()
"""
COMMAND = """
from flows.cli import admin
admin.__file__ = f"{root}/flows/cli/admin.py"
Path(root, "tests", "bench").mkdir(parents=True)
Path(root, "tests", "bench", "one.py").write_text(sys.argv[2])
admin.app(["bench", "one"])
"""
SLEEP = "import time; time.sleep(600)"
BENCHMARK = """
import subprocess, sys, time
from pathlib import Path
root = sys.argv[1]
{}
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize(
    ("start", "program", "processes"),
    [
        (STOCK_SERVER, SERVER, 4),
        (SERVER_OF_OURS, SERVER, 4),
        (LOAD_CLIENT, SLEEP, 2),
        (COMMAND, SLEEP, 2),
    ],
    ids=["stock server", "server of ours", "load client", "graftwork bench"],
)
def test_nothing_outlives_a_benchmark(
    start: str, program: str, processes: int, number: signal.Signals, tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps(RECIPES["tiny-dense"].config()))
    path = [str(BENCH), str(BENCH.parents[1])]
    code = f"import sys; sys.path[:0] = {path}" + BENCHMARK.format(start)
    benchmark = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), program])
    # The benchmark, the server's reaper, the server and its child, by their different command lines.
    started = eventually(lambda: len(set(left_behind(tmp_path))) >= processes, 60)
    benchmark.send_signal(number)
    benchmark.wait(60)
    assert started
    assert eventually(lambda: not left_behind(tmp_path), 60), left_behind(tmp_path)
