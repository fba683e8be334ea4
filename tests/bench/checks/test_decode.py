"""The benchmark of decoding compares engines in one environment, in turn."""

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest

from engine.base.recipes import RECIPES
from engine.base.resident import BaseInfo
from engine.serving import server
from engine.settings.params import Params
from tests.helpers import live, stock_server
from tests.helpers.bench_files import load


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


def test_sides_take_turns_in_either_order(monkeypatch: pytest.MonkeyPatch):
    decode, taken = load("decode", monkeypatch), []

    def speeds(server: str, names: list[str], seed: int) -> dict[str, float]:
        taken.append((server, seed))
        return {"decode": 1.0, "prefill": 2.0}

    monkeypatch.setattr(decode, "speeds", speeds)
    runs = decode.taking_turns({"ours": ("a", []), "base": ("b", []), "stock": ("c", [])}, 2)
    assert "".join(server for server, _ in taken) == "abccbaabc"
    assert len({seed for _, seed in taken}) == 9
    # The first round warms up.
    assert {side: len(each) for side, each in runs.items()} == {"ours": 2, "base": 2, "stock": 2}


def test_each_ratio_is_of_one_repeat(monkeypatch: pytest.MonkeyPatch):
    decode = load("decode", monkeypatch)

    def runs(*values: float) -> list[dict[str, float]]:
        return [{"decode": value, "prefill": 10 * value} for value in values]

    found = decode.figures_of({"ours": runs(6.0, 8.0), "ours_base": runs(9.0, 5.0), "base": runs(10.0, 16.0)})
    assert found["share_of_base"] == found["prefill_share_of_base"] == [0.6, 0.5]
    assert found["base_rows_share_of_base"] == [0.9, 5 / 16]
    assert found["decode_tok_s_base"] == [10.0, 16.0]
    # Stock has no LoRA on experts on a CPU.
    assert "over_stock" not in found
