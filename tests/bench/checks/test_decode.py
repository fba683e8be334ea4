"""The benchmark of decoding compares engines in one environment."""

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest

from engine.base.resident import BaseInfo
from engine.base.toys.recipes import RECIPES
from engine.serving import server
from engine.settings.params import Params
from tests.helpers import live, stock_server


def test_a_stock_server_has_the_environment_and_the_process_settings_of_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The variables that ours sets for itself, the executor in the process, and the same limits."""
    started: list[tuple[list[str], dict[str, str]]] = []

    def start(arguments, output, environment):
        started.append((arguments, environment))

    for name in ("OMP_NUM_THREADS", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(live, "start_reaped", start)
    (tmp_path / "config.json").write_text(json.dumps(RECIPES["tiny-dense"].config()))
    live.StockServer(tmp_path, "bfloat16").client.close()
    (command, environment), params = started[0], Params()
    served: list[str] = []
    monkeypatch.setattr(stock_server, "serve", served.extend)
    before = dict(os.environ)
    ours, theirs = dict(before), dict(environment)
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", ours)
        server.set_environment(params)
        patch.setattr(os, "environ", theirs)
        stock_server.serve_like_ours(command[1:])
    differ = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    # The first keeps our plugin out, the second opens the endpoint that reloads weights.
    assert differ == {"VLLM_PLUGINS", "VLLM_SERVER_DEV_MODE"}
    assert {"OMP_WAIT_POLICY", "THP_MEM_ALLOC_ENABLE", "TORCH_COMPILE_DISABLE"} <= theirs.keys()
    assert command[0] == stock_server.__file__
    assert served[-2:] == server.executor_arguments(params.engine, None)
    shared = ("--max-model-len", "--max-num-seqs", "--kv-cache-memory-bytes", "--block-size")
    base = BaseInfo("base", tmp_path, "b" * 64)
    line = dict(pairwise(server.server_arguments(params, Path("params.json"), base)))
    given = dict(pairwise(served))
    assert [given[name] for name in shared] == [line[name] for name in shared]
