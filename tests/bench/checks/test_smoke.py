"""Each benchmark from its arguments to its figures: short where it needs no service, with made services else.

What is made takes known times, so that figures are known too; what real services do is what the benchmarks
measure, and what test_rollback.py, test_catalog.py and test_scale.py start.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine.settings.params import Params
from engine.training.model.lora import ResidentBase
from engine.training.sample_groups import Sample
from tests.helpers.bench_files import BENCH, load, parsed

NAMES = sorted(path.stem for path in BENCH.glob("[a-z]*.py"))
URL = "http://127.0.0.1:1"
Made = SimpleNamespace
# Patches a benchmark, and returns its arguments with the figures that it then has.
Smoke = Callable[[ModuleType, pytest.MonkeyPatch, Path], tuple[list[str], dict[str, Any]]]


def replace(bench: ModuleType, patch: pytest.MonkeyPatch, **made: Any) -> None:
    for name, value in made.items():
        patch.setattr(bench, name, value)


def given(value: Any) -> Callable[..., Any]:
    """Return a function of anything."""
    return lambda *_, **__: value


def within(value: Any) -> Callable[..., Any]:
    """Return a function of anything to be entered."""
    return lambda *_, **__: nullcontext(value)


def later(value: Any) -> Callable[..., Any]:
    """Return a coroutine function of anything."""

    async def found(*_: Any, **__: Any) -> Any:
        return value

    return found


def ran(bench: ModuleType, arguments: Iterable[str], root: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what a benchmark writes, empty where it writes nothing."""
    name, params = bench.__name__.removeprefix("bench_"), root / "p.yaml"
    params.write_text(f"state_dir: {root / 'state'}")
    patch.setattr(sys, "argv", [name, "--params", str(params), "--out", str(root), *arguments])
    file = root / f"{name}.json"
    file.unlink(missing_ok=True)
    with suppress(SystemExit):
        bench.main()
    return dict(json.loads(file.read_text())) if file.exists() else {}


def canary(bench: ModuleType, patch: pytest.MonkeyPatch, base: Path) -> tuple[list[str], dict[str, Any]]:
    class Short(bench.Run):  # type: ignore[misc, name-defined]
        def repeats(self, *what: Any, most: int | None = None, **how: Any) -> list[Any]:
            return list(super().repeats(*what, most=most or 1))

    replace(bench, patch, KINDS={"plain": frozenset()}, CHUNK=10, Run=Short)
    replace(bench, patch, EFFECTS={30: (0.1, 600)}, EFFECT_CANARIES={False: (10, 0)})
    parts = {name: bench.evaluated.PARTS[name] for name in ("evaluated_false_end_rate.shadow-90",)}
    replace(
        bench.evaluated,
        patch,
        CHUNK=5,
        RELEASES={False: 5, True: 5},
        EXPOSED_RELEASES={False: 5},
        PARTS=parts,
    )
    wanted = {"rollback_share.ours.30": 1.0, "aa_false_rollback_rate.plain": ANY}
    wanted |= {"evaluated_false_end_rate.shadow-90": ANY, "exposed_users.worse.shadow": 0}
    return ["--requests", "1500", "--workers", "1"], wanted


def catalog(bench: ModuleType, patch: pytest.MonkeyPatch, base: Path) -> tuple[list[str], dict[str, Any]]:
    found = bench.record.Figures({"restart_s": 1.0})
    replace(bench, patch, ensure_base=given(Made(path=base)), measure=given((found, [])))
    return [], {"restart_s": 1.0}


def concurrency(bench: ModuleType, patch: pytest.MonkeyPatch, base: Path) -> tuple[list[str], dict[str, Any]]:
    used = {"engine": 1.0, "trainer": 0.5}
    account = Made(used=given(used), wall=dict, by_phase=dict)

    def one(policies: int, repeat: int, mode: Any) -> Any:
        seconds = 3.0 if mode is bench.one_by_one else 1.5
        return bench.Round(seconds, account, 1, (0.5,) * policies, ("a",) * policies)

    replace(bench, patch, live=within(Made(round=one)))
    return ["--repeats", "6"], {"speedup.tiny-dense.n3": 2.0, "equal_adapters.tiny-dense.n3": 1.0}


def decode(bench: ModuleType, patch: pytest.MonkeyPatch, base: Path) -> tuple[list[str], dict[str, Any]]:
    engine, plain, stock = (Made(speed=speed, publish=given("a")) for speed in (70.0, 100.0, 40.0))
    replace(bench, patch, make_base=given(base), adapters=given([]), is_right=given(True))
    replace(bench, patch, start_engine=given(engine), stop_engine=given(None))
    replace(bench, patch, StockServer=within(plain), stock_with_adapters=within(stock))
    replace(bench, patch, speeds=lambda server, *_: {"decode": server.speed})
    return [], {"share_of_base.tiny-dense": 0.7, "over_stock.tiny-dense": 1.75}


def fairness(bench: ModuleType, patch: pytest.MonkeyPatch, base: Path) -> tuple[list[str], dict[str, Any]]:
    async def share(a: Any, b: Any, clients_of_a: int, requests: int) -> tuple[float, float]:
        return (0.1 if clients_of_a == bench.SEQUENCES else 0.11), 5.0

    keys = Made(create=given("key"))
    replace(bench, patch, live=within(served(base)), whole_catalog=given(Made(keys=keys, close=given(None))))
    replace(bench, patch, Side=given(None), share=share)
    return [], {"b_ttft_p95_ratio.tiny-dense": pytest.approx(1.1)}


def fused(bench: ModuleType, patch: pytest.MonkeyPatch, base: Path) -> tuple[list[str], dict[str, Any]]:
    replace(bench, patch, POLICIES=(2,), SAMPLES=(8,), ensure_base=given(Made(path=base)))
    return ["--bases", "tiny-dense", "--repeats", "1"], {"error.tiny-dense.n2.s8": pytest.approx(0, abs=1e-6)}


def gateway(bench: ModuleType, patch: pytest.MonkeyPatch, base: Path) -> tuple[list[str], dict[str, Any]]:
    def side(url: str, keys: Any, pid: int, model: str) -> Any:
        load = (90.0, 0.002) if url == URL else (100.0, 0.001)
        answers = {"load": later(load), "text": later("same"), "ask": later(0.1)}
        return Made(url=url, model=model, key_count=1, **answers)

    async def refused_cpu_s(url: str, *_: Any) -> float:
        return 1.2 if url == f"{URL}/gateway" else 1.0

    replace(bench, patch, live=within(served(base)), bare_engine=within((f"{URL}0", 1)), Side=side)
    replace(bench, patch, make_keys=given(["key"]), migrate=given(None), bad_keys=within(None))
    replace(bench, patch, refusing=lambda kind, _: nullcontext((f"{URL}/{kind}", None)))
    replace(bench, patch, refused_cpu_s=refused_cpu_s, revoked_s=later(0.1), ttft_p95=later(0.1))
    wanted = {"throughput": 0.9, "added_cpu_ms": pytest.approx(1), "refused_over_bare": 1.2}
    return [], wanted | {"added_p50_ms": 0.0, "ttft_p95_with_bad_keys": 1.0, "revoked_s": 0.1}


def handoff(
    bench: ModuleType, patch: pytest.MonkeyPatch, base: Path, reloaded: int = 7
) -> tuple[list[str], dict[str, Any]]:
    lengths, merged = (0, *bench.LENGTHS), [7] * 305
    replace(bench, patch, make_base=given((base, "float32")), sample=given(None), agreement=given(305))
    replace(bench, patch, start_engine=given(Made(base_path=base)), stop_engine=given(None))
    replace(bench, patch, StockServer=within(Made(client=None)))
    replace(bench, patch, adapter_path=given(dict.fromkeys(lengths, 0.5)))
    replace(bench, patch, merged_path=given((dict.fromkeys(lengths, 20.0), merged)))
    replace(bench, patch, reload_path=given(({64: 1.0}, [reloaded] * 64)))
    return [], {"ratio_64.tiny-dense": 40.0, "ratio_reload_64.tiny-dense": 2.0, "tokens_agreed": 305.0}


def load_(bench: ModuleType, patch: pytest.MonkeyPatch, base: Path) -> tuple[list[str], dict[str, Any]]:
    small = {
        "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "intermediate_size": 64,
    }  # fmt: skip
    # Of all that the tests have imported a collection takes half a second, and there are many.
    replace(bench, patch, WIDTH=bench.WIDTH | small, MOST_PAIRS={False: 6}, gc=Made(collect=given(0)))
    return ["--repeats", "2"], dict.fromkeys(("over_floor", "speedup_vs_fused", "packed_s.n16"), ANY)


def ranks(bench: ModuleType, patch: pytest.MonkeyPatch, base: Path) -> tuple[list[str], dict[str, Any]]:
    def trained(_: Any, policy: str, asked: dict[str, int], is_scored: bool, key: str) -> Any:
        return bench.Trained(100 * asked["rank"], 3.0, 0.5 + asked["seed"] / 100)

    patch.setattr(bench.concurrency, "live", within(Made(params=Params(), key="key")))
    replace(bench, patch, trained=trained, base_score=given(0.2))
    wanted = {"bytes.r8": 800, "step_s.r8": 1.0, "gain.r8": pytest.approx(0.32), "score.base": 0.2}
    return ["--long"], wanted


def real(bench: ModuleType, patch: pytest.MonkeyPatch, base: Path) -> tuple[list[str], dict[str, Any]]:
    examples = bench.examples_of([[1, 2]], [[Sample((3, 4), (-1.0, -1.0), "")] * 2])
    config = json.loads((base / "config.json").read_text())
    found = {"rollout_s": [2.0] * 6, "rollout_over_plain": [1.0] * 6}
    replace(bench, patch, ensure_base=given(Made(path=base)), base_config=given(config))
    replace(bench, patch, sampled=given(({}, examples, found)), updated=given(([1.0], 1.0)))
    replace(bench, patch, load_base=given(ResidentBase(base, 1, 64)))
    patch.setattr(bench.torch, "set_num_threads", given(None))
    return [], {"rollout_over_plain": 1.0, "answer_tokens": 2.0}


def rollback(bench: ModuleType, patch: pytest.MonkeyPatch, base: Path) -> tuple[list[str], dict[str, Any]]:
    one = Made(until_s=0.3, tombstone_s=0.1, admitted_s=0.2, crossed=[1], changed=0)
    found = bench.Series([one, one], [Made(fault="")])
    replace(bench, patch, measure=given({"up": found, "down": found}))
    return [], {"rollback_most_s": 0.3, "failed_requests": 0}


def scale(bench: ModuleType, patch: pytest.MonkeyPatch, base: Path) -> tuple[list[str], dict[str, Any]]:
    known = dict.fromkeys(bench.NAMES, given({"rollback_s.up": [0.2, 0.4, 0.3]}))
    replace(bench, patch, cluster=within(Made(key="key")), Crowd=within(Made(asked=[None], stop=given(None))))
    replace(bench, patch, scenarios=given(known), observations=given({"observations_lost": [0]}))
    replace(bench, patch, older_commit=given("c0ffee"))
    return [], {"rollback_s.up": 0.4, "observations_lost": 0}


def shadow(bench: ModuleType, patch: pytest.MonkeyPatch, base: Path) -> tuple[list[str], dict[str, Any]]:
    def asked(live: Any, client: Any, rate: float, number: int, seconds: float, found: Any) -> list[Any]:
        is_beside = seconds == bench.START_S + bench.PHASES_S[True][1]
        return [Made(ttft=0.21 if is_beside else 0.2, ask=Made(at=9.0), is_right=True)] * 20

    controller = Made(
        start_release=given({"id": "r"}), hold=given(None),
        release=given({"state": "running", "step": "shadow"}),
    )  # fmt: skip
    live = Made(controller=controller, engine=Made(copies=given(None)), server=None, revision="d")
    replace(bench, patch, site=within(live), Client=within(Made(cpu_share=0.1)), bearable=given(20.0))
    clock = itertools.count(0.0, 20.0)
    replace(bench, patch, users=asked, time=Made(time=lambda: next(clock)))
    replace(bench, patch, answers_of=lambda *_: bench.Shadowed([next(clock) - 39.0] * 4, [0.3] * 4, 0))
    wanted = {"users_ttft_p95_ratio": pytest.approx(1.05), "shadow_share": 0.2}
    return ["--long"], wanted | {"users_per_s.tiny-dense": 10.0}


def storm(bench: ModuleType, patch: pytest.MonkeyPatch, base: Path) -> tuple[list[str], dict[str, Any]]:
    def ours(*parts: Any) -> dict[int, float]:
        result = parts[5]
        result.figures.values["errors.tiny-dense"] = 0.0
        result.figures.add_pairs({"ratio": [1.1] * 6}, ".tiny-dense.n32")
        return {32: 1.15}

    replace(bench, patch, Client=within(Made(cpu_share=0.1)), ours=ours)
    return [], {"ratio.tiny-dense.n32": 1.1, "errors": 0.0}


def quality(bench: ModuleType, patch: pytest.MonkeyPatch, base: Path) -> tuple[list[str], dict[str, Any]]:
    lines = list(bench.recorded.simulated(2, seed=2))
    replace(bench, patch, ROUNDS={False: 1}, SIMULATED=2)
    patch.setattr(bench.recorded, "load", given(lines))
    patch.setattr(bench.scored, "measured", given([{"pass_speedup": 3.0}]))
    patch.setattr(bench.views, "measure", given({"best": 0.5, "worst": 1.5, "quality of one policy": 0.01}))
    figures = {"readings.recorded": 10.0, "missed.recorded": 0.0, "flagged.recorded": 0.0}
    return [], figures | {"views_s.100000": 1.5, "policy_view_s.100000": 0.01, "pass_speedup": 3.0}


def taught(bench: ModuleType, patch: pytest.MonkeyPatch, base: Path) -> tuple[list[str], dict[str, Any]]:
    def steps(gap: float, seconds: float) -> list[dict[str, float]]:
        return [{"loss": 2.0 - number / 10 + gap, "seconds": seconds} for number in range(bench.STEPS)]

    services = Made(environment=given({}), session=within(None))
    replace(bench, patch, environment=given(base), services=services, local_key=given("key"))
    replace(bench, patch, ensure_base=given(Made(path=base)), job_of=given({}))
    replace(bench, patch, write_adapter=given(base), ours=given(steps(0.0, 1.0)))
    replace(bench, patch, theirs=given(steps(5e-5, 4.0)))
    wanted = {"sft_loss_gap.tiny-dense": pytest.approx(5e-5), "dpo_step_ratio.tiny-dense": 0.25}
    return [], wanted


def tinker(bench: ModuleType, patch: pytest.MonkeyPatch, base: Path) -> tuple[list[str], dict[str, Any]]:
    def done(seconds: float) -> Callable[..., Any]:
        return given({"seconds": [9.0] + [seconds] * 5, "losses": [1.0], "tokens": 100})

    replace(bench, patch, live=within(Made(job=given(None), theirs=done(1.1), ours=done(1.0))))
    return [], {"overhead": pytest.approx(1.1), "own_step_s": pytest.approx(1.0)}


def trl(bench: ModuleType, patch: pytest.MonkeyPatch, base: Path) -> tuple[list[str], dict[str, Any]]:
    def one(policies: int, step_s: float) -> Any:
        ends = tuple(step_s * (number + 1) for number in range(8 * policies))
        return bench.Run(ends, policies, (0.5,) * 8, (32.0,) * 8)

    services = Made(environment=given({}), session=within(None))
    replace(bench, patch, environment=given(base), lengthy_base=given(base), job=given({}), services=services)
    replace(bench, patch, run_theirs=given(one(1, 4.0)), local_key=given("key"))
    replace(bench, patch, run_ours=lambda _, named, __: one(len(named), 1.0))
    return [], {"step_ratio_1": 0.25, "step_ratio_3": 0.25, "round_ratio_3": 0.75}


def wave(bench: ModuleType, patch: pytest.MonkeyPatch, base: Path) -> tuple[list[str], dict[str, Any]]:
    replace(bench, patch, Client=within(Made(cpu_share=0.1)), waves=given(({"errors_waves": 0.0}, [])))
    return [], {"errors": 0.0}


def served(base: Path) -> Any:
    """Return a running engine of ours that is none."""
    params = Params(state_dir=base.parent / "none")
    return Made(params=params, base=Made(name="base"), server=Made(url=URL), roots=(1,))


class Anything:
    def __eq__(self, _: object) -> bool:
        return True


ANY = Anything()
SMOKES: dict[str, Smoke] = {
    one.__name__.rstrip("_"): one
    for one in (
        canary, catalog, concurrency, decode, fairness, fused, gateway, handoff, load_, quality, ranks, real,
        rollback, scale, shadow, storm, taught, tinker, trl, wave,
    )
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_writes_its_figures(
    name: str, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bench = load(name, monkeypatch)
    arguments, wanted = SMOKES[name](bench, monkeypatch, tiny_base)
    found = ran(bench, arguments, tmp_path, monkeypatch)
    assert {figure: found.get(figure) for figure in wanted} == wanted
    assert found["is_long"] == ("--long" in arguments)


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_takes_settings_and_a_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = ["--params", str(tmp_path / "p.yaml"), "--out", str(tmp_path), "--long"]
    found = parsed(name, asked, monkeypatch)
    assert (found["params"], found["out"], found["long"]) == (tmp_path / "p.yaml", tmp_path, True)


def test_a_reload_that_answers_otherwise_is_red(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bench = load("handoff", monkeypatch)
    arguments, _ = handoff(bench, monkeypatch, tiny_base, reloaded=8)
    assert ran(bench, arguments, tmp_path, monkeypatch) == {}


def test_ranks_without_the_long_form_knows_no_score(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bench = load("ranks", monkeypatch)
    ranks(bench, monkeypatch, tiny_base)
    replace(bench, monkeypatch, trained=lambda *_: bench.Trained(8, 3.0, None))
    found = ran(bench, [], tmp_path, monkeypatch)
    assert (found["bytes.r32"], "score.r32" in found) == (8, False)


def test_ctrl_c_while_a_base_is_prepared_shows_what_there_is(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    bench = load("handoff", monkeypatch)
    handoff(bench, monkeypatch, tiny_base)
    started: list[str] = []

    def make_base(name: str, *_: Any) -> tuple[Path, str]:
        started.append(name)
        if name != bench.BASES[0]:
            raise KeyboardInterrupt
        return tiny_base, "float32"

    replace(bench, monkeypatch, make_base=make_base)
    assert ran(bench, ["--long"], tmp_path, monkeypatch) == {}
    said = capsys.readouterr()
    assert started == list(bench.BASES[:2])
    assert "ratio_64.tiny-dense" in said.out
    assert "ended by Ctrl-C. This is what it had" in said.err
