"""Many policies on one resident base: one after another against all at once, evaluation included.

    graftwork bench concurrency [--base tiny-dense|tiny-moe|smollm2-135m|qwen3-4b|...] [--policies 3 5 9]
                                [--repeats N] [--long]

Real engine and trainer, started by the supervisor as `graftwork up` does, and the flow's own steps: `train`,
then `score` on the policy's frozen suite. Both modes use the same processes, settings and code; they
alternate, in the other order in every other repeat, and every round has sessions of its own. A repeat's seeds
are the same in both modes, so that both draw the same samples: in float32 on a dense base their adapters must
be equal. On every base the modes' scores must be, within what seeds or so few items do to them. The default
takes 3 policies on tiny-dense for 2 steps each, until the speed-up is decided. `--long` takes both tiny bases
with 3, 5 and 9 policies for 5 steps, what a switch of policies costs, and the peaks of memory.

The shapes of Qwen3 are random weights for a GPU. They know nothing, so their reward is `_shapes.by_length`.
smollm2-135m (after `make real`) has the policies of its main job, by the recipe that fits the base.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import _record as record
from _account import Account, members, peak_bytes, reset_peaks
from _rounds import Round, compared, faults, where_time_goes
from _run import Run, options, start
from _shapes import SHAPES, shaped_base

from engine.base.fitting import fitting_settings
from engine.base.names import PACKAGED
from engine.base.resident import base_config, ensure_base
from engine.services import lifecycle as services
from engine.settings.params import BaseConfig, Params, load_params
from engine.settings.policies import PolicyConfig
from engine.threads import in_parallel
from tests.helpers.live import free_port

LEAST = {
    "tiny-dense": 1.5, "tiny-moe": 1.3, "smollm2-135m": 1.5, "qwen3-0.6b": 2.81, "qwen3-4b": 2.81,
    "qwen3-30b-a3b": 2.0,
}  # fmt: skip
TINY = ("tiny-dense", "tiny-moe")
# Answers of a base that knows nothing go on to the limit.
SHAPED = {"verifier": "python:_shapes:by_length", "max_tokens": 64}
TASKS = (("addition", "terse", "addition-terse"), ("sorting", "json", "sorting-json"))
# A speed-up of so much of what idle cores allow is bounded by the machine, and no longer by `LEAST`.
SHARE_OF_BOUND = 0.9
SWITCHES, SWITCH_ROUNDS = 40, 10


class Bench:
    """Live services on one base, and the rounds that are run on them."""

    def __init__(self, params: Params, steps: int):
        from engine.catalog.opening import whole_catalog

        self.params, self.steps = params, steps
        fitting = fitting_settings(base_config(params.base, params.paths))
        self.asked = [fitting | asked for asked in asked_of(params.base.name)]
        catalog = whole_catalog(params.paths.catalog_url)
        self.key = catalog.keys.ensure_local(params.paths.local_key)
        catalog.close()
        states = services.status(params)
        self.processes = members({state.name: state.pid for state in states if state.pid})
        # The flows' own memory is not the resident base's.
        self.resident = {name: group for name, group in self.processes.items() if name != "flows"}
        self.rounds = 0

    def round(self, policies: int, repeat: int, run: Callable[..., list[Any]]) -> Round:
        """Train and score `policies` fresh policies; `run` takes the calls and says in which order."""
        self.rounds += 1
        named = {f"r{self.rounds}-p{i}": self.config(i, repeat) for i in range(policies)}
        params = self.params.model_copy(update={"policies": named})
        account = Account(self.processes)
        reset_peaks(self.resident)
        with watching(account), account.sampling():
            clock = time.monotonic()
            found = run(*(partial(adapted, params, name, config, self.key) for name, config in named.items()))
            seconds = time.monotonic() - clock
        scores, digests = zip(*found, strict=True)
        return Round(seconds, account, peak_bytes(self.resident), scores, digests)

    def config(self, number: int, repeat: int) -> PolicyConfig:
        asked, seed = self.asked[number % len(self.asked)], 100 * (repeat + 1) + number
        return PolicyConfig.model_validate(asked | {"steps": self.steps, "seed": seed})

    def switch_seconds(self) -> list[float]:
        """Return by how much a call takes longer when another policy had the last one, of each round.

        Both policies are resident.
        """
        from engine.training.rollout_data import datum
        from engine.training.sample_groups import Sample
        from engine.training.service.client import TrainerClient

        client, config = TrainerClient.of(self.params), self.config(0, 0)
        fields = {"rank": config.rank, "alpha": config.alpha, "targets": ["q_proj"], "seed": 1, "holder": "x"}
        known = {"policy_config": config.model_dump(mode="json")}
        names = ("switch-1", "switch-2")
        opened = [client.create_session(name, name, **fields, **known) for name in names]
        data = [datum([40, 41, 42], Sample((43,), (-1.0,), ""), 1.0)]
        orders = {"alone": opened[:1] * SWITCHES, "turns": opened * (SWITCHES // 2)}

        def seconds(mode: str) -> float:
            times = []
            for session in orders[mode]:
                clock = time.perf_counter()
                client.forward_backward(session, data)
                times.append(time.perf_counter() - clock)
            return statistics.median(times)

        seconds("turns")
        rounds = [{mode: seconds(mode) for mode in record.in_turn(orders, n)} for n in range(SWITCH_ROUNDS)]
        return [took["turns"] - took["alone"] for took in rounds]


def adapted(params: Params, policy: str, config: PolicyConfig, key: str) -> tuple[float, str]:
    """Train and score a policy as its flow does; return the mean score and the revision's digest."""
    from engine.training.loop import train
    from tasks import score

    trained = train(params, policy, config, key)
    scored = score.score(params, policy, trained.digest, config.suite, key, reuse=False)
    return scored.mean, trained.digest


@contextmanager
def watching(account: Account) -> Iterator[None]:
    """Count the calls that make up an adaptation to their phases."""
    from engine.problems.verifiers import Verifier
    from engine.training import rollout_data
    from engine.training.service.client import TrainerClient
    from tasks import score

    parts = (
        (rollout_data, "draw", "rollout"), (Verifier, "judge", "reward"), (score, "score", "score"),
        (TrainerClient, "forward_backward", "update"), (TrainerClient, "optim_step", "update"),
        (TrainerClient, "export", "handoff"), (TrainerClient, "create_session", "handoff"),
    )  # fmt: skip
    with ExitStack() as stack:
        for owner, name, phase in parts:
            stack.enter_context(patch.object(owner, name, account.watched(getattr(owner, name), phase)))
        yield


def asked_of(base: str) -> list[dict[str, Any]]:
    """Return what the policies of a base are asked: tasks of ours, or of its own main job."""
    if base in PACKAGED:
        policies = load_params(f"params.{base}.yaml").policies.values()
        return [policy.model_dump(exclude_unset=True) for policy in policies]
    asked = [{"task": task, "contract": contract, "suite": suite} for task, contract, suite in TASKS]
    return asked if base in TINY else [one | SHAPED for one in asked]


def one_by_one(*calls: Callable[[], Any]) -> list[Any]:
    return [call() for call in calls]


MODES = {"sequential": one_by_one, "concurrent": in_parallel}


def settings(given: Params, base: str, state: Path, **engine: Any) -> Params:
    """Return settings for services of their own, on a base that is built in the given state directory.

    `engine` are more settings of the engine.
    """
    given.paths.bases.mkdir(parents=True, exist_ok=True)
    (state / "bases").symlink_to(given.paths.bases)
    name = base
    if base in SHAPES:
        tokenizer = ensure_base(BaseConfig(name="tiny-dense"), given.paths).path
        name = str(shaped_base(SHAPES[base], given.paths.bases / f"random-{base}", tokenizer))
    ports = {name: {"port": free_port()} for name in ("controller", "mlflow", "prefect")}
    own = load_params(f"params.{base}.yaml") if base in PACKAGED else Params()
    return Params.model_validate(
        {
            "state_dir": state,
            "base": {"name": name},
            "suites_dir": own.suites_dir,
            "python_modules": [*own.python_modules, "_shapes"],
            # A start beside other work is slow, and not what is measured.
            "engine": {"port": free_port(), "start_timeout_s": 900, **engine},
            "trainer": {"port": free_port()},
            **ports,
        }
    )


@contextmanager
def live(given: Params, base: str, steps: int, **engine: Any) -> Iterator[Bench]:
    """Start engine and trainer, with nothing trained so far."""
    from tasks.steps import preload

    with tempfile.TemporaryDirectory(prefix="graftwork-concurrency-") as root:
        params = settings(given, base, Path(root), **engine)
        os.environ.update(services.environment(params))
        preload()
        build = partial(ensure_base, params.base, params.paths)
        with services.session(params, build, told, ("engine", "trainer")):
            yield Bench(params, steps)


def measure(
    run: Run, given: Params, base: str, arguments: argparse.Namespace, figures: record.Figures, share: float
) -> list[str]:
    """Add a base's figures; return why its modes did not do the same work, a sentence each."""
    wrong: list[str] = []
    with live(given, base, arguments.steps) as bench:
        # The first rounds warm up: imports, allocators, the engine's first shapes of either mode.
        for mode in MODES.values():
            bench.round(min(arguments.policies), -1, mode)
        for number, policies in enumerate(arguments.policies):
            suffix = f".{base}.n{policies}"
            part = share / (len(arguments.policies) - number)
            pairs, modes = pairs_of(run, bench, base, policies, arguments.repeats, part)
            figures.add_pairs(pairs, suffix)
            if pairs:
                for mode, one in modes.items():
                    found = where_time_goes(mode, one)
                    figures.values |= {f"{name}{suffix}": value for name, value in found.items()}
                wrong += faults(base, **modes)
        if run.is_long and not run.is_interrupted:
            figures.add({"switch_s": bench.switch_seconds()}, f".{base}")
    if run.is_long and not run.is_interrupted:
        figures.values |= gain_of_many(figures.values, base, arguments.policies)
        figures.values[f"peak_memory_ratio.{base}"] = peak_memory_ratio(given, base, arguments)
    return wrong


def peak_memory_ratio(given: Params, base: str, arguments: argparse.Namespace) -> float:
    """Return concurrent / sequential peaks of engine and trainer, with the most policies.

    Each mode in fresh processes: what an allocator has had once, it keeps.
    """
    peaks = {}
    for name, mode in MODES.items():
        with live(given, base, arguments.steps) as bench:
            peaks[name] = bench.round(max(arguments.policies), 0, mode).peak
    return peaks["concurrent"] / peaks["sequential"]


def pairs_of(
    run: Run, bench: Bench, base: str, policies: int, repeats: int | None, share: float
) -> tuple[dict[str, list[float]], dict[str, list[Round]]]:
    """Return each figure's pairs, until the speed-up is decided, and each mode's rounds."""
    rounds: dict[str, list[Round]] = {mode: [] for mode in MODES}

    def take(repeat: int) -> dict[str, float]:
        one = {mode: bench.round(policies, repeat, MODES[mode]) for mode in record.in_turn(MODES, repeat)}
        for mode, found in one.items():
            rounds[mode].append(found)
        figures = compared(**{mode: [found] for mode, found in one.items()})
        return {name: values[0] for name, values in figures.items()}

    bounds = {"speedup": record.at_least(LEAST[base])}
    what = f"{base}, {policies} policies, pair"
    return run.pairs(what, take, bounds, share=share, most=repeats), rounds


def gain_of_many(figures: Mapping[str, float], base: str, policies: Sequence[int]) -> dict[str, float]:
    """Return what the most policies gain over the fewest."""
    few, many = (figures[f"speedup.{base}.n{n}"] for n in (min(policies), max(policies)))
    return {f"speedup_n{max(policies)}_over_n{min(policies)}.{base}": many / few}


def bounds_of(figures: Mapping[str, float], policies: Sequence[int]) -> dict[str, record.Bound]:
    """Return the bounds: each speed-up has one of its own, or one on its share of what the machine allows."""
    found = {
        "speedup": record.at_least(),
        "share_of_bound": record.at_least(),
        "peak_memory_ratio": record.at_most(1.05),
        f"speedup_n{max(policies)}_over_n{min(policies)}": record.at_least(1.0),
    }
    for name, share in figures.items():
        figure, _, suffix = name.partition(".")
        if figure == "share_of_bound":
            is_full, base = share >= SHARE_OF_BOUND, suffix.rpartition(".n")[0]
            bounded, limit = ("share_of_bound", SHARE_OF_BOUND) if is_full else ("speedup", LEAST[base])
            found[f"{bounded}.{suffix}"] = record.at_least(limit)
    return found


def told(name: str, state: str) -> None:
    print(f"  {name:<12}{state}", flush=True)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--base", choices=list(LEAST), action="append")
    parser.add_argument("--policies", type=int, nargs="+")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--repeats", type=int, help="pairs, at most")
    arguments = parser.parse_args()
    run = Run("concurrency", arguments.long)
    arguments.policies = arguments.policies or ([3, 5, 9] if run.is_long else [3])
    arguments.steps = arguments.steps or (5 if run.is_long else 2)
    figures, wrong = record.Figures(), []
    bases = arguments.base or (TINY if run.is_long else TINY[:1])
    for number, base in enumerate(bases):
        if run.is_interrupted:
            break
        with run.preparing():
            share = 1 / (len(bases) - number)
            wrong += measure(run, load_params(arguments.params), base, arguments, figures, share)
    print(*wrong, sep="\n")
    bounds = bounds_of(figures.values, arguments.policies)
    record.report(run, figures, bounds, not wrong, arguments.out)


if __name__ == "__main__":
    start(main)
