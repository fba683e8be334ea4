"""The Tinker API: what it costs over our own client, beside others, and for hundreds of single samples.

    graftwork bench tinker [--repeats N] [--long]

Real engine, trainer and API, started by the supervisor as `graftwork up` does. `overhead`: the SDK's steps
over the same calls of our own clients, in turns and with the same seeds, so that both must have the same
losses. `speedup`: two clients of the SDK and Graftwork's own loop at once, against one after another; each
must end as it does alone. `singles`: many calls for one sample at once, over one request of our own client
for all of them. The default measures `overhead` alone. Not a GPU's figures: a base of 3 million parameters
on a CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import _record as record
from _run import Run, options, start

from engine.base.resident import ensure_base
from engine.catalog.keys import as_tinkers
from engine.catalog.opening import whole_catalog
from engine.clients.engine import EngineClient
from engine.process_reaper import die_with_parent
from engine.services import lifecycle as services
from engine.settings.params import Params, load_params
from engine.settings.policies import PolicyConfig
from engine.threads import in_parallel
from engine.training.service import protocol
from engine.training.service.client import TrainerClient
from tests.helpers.live import free_port
from tests.helpers.tinker_job import Job, advantages, prompts_of

BOUNDS = {
    "overhead": record.at_most(1.1),
    "speedup": record.at_least(1.0),
    "singles": record.at_most(1.1),
}
ALPHA = 32.0


@dataclass
class Bench:
    """Running services, a key for either side, and a folder for jobs of clients."""

    params: Params
    key: str
    local: str
    scratch: Path
    jobs: int = 0

    def job(self, kind: str, seed: int, **sizes: int) -> Job:
        base = self.params.base.name
        return Job(kind, self.params.url("tinker"), self.key, base, seed, **sizes)

    def theirs(self, job: Job) -> dict[str, Any]:
        """Let a client of the SDK do a job in a process of its own; return what it measured."""
        self.jobs += 1
        file = self.scratch / f"{job.kind}-{self.jobs}-{job.seed}.json"
        file.write_text(json.dumps(asdict(job)))
        # Without -P its `import tinker` would find this file.
        worker = Path(__file__).with_name("_tinker_clients.py")
        variables = os.environ | {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
        with file.with_suffix(".log").open("w") as log:
            ended = subprocess.run(
                [sys.executable, "-P", str(worker), str(file)], cwd=self.scratch, env=variables, stdout=log,
                stderr=log, check=False, preexec_fn=partial(die_with_parent, os.getpid()),
            )  # fmt: skip
        if ended.returncode:
            said = file.with_suffix(".log").read_text()[-3000:]
            sys.exit(f"bench tinker: a client ended with {ended.returncode}.\n{said}")
        done: dict[str, Any] = json.loads(file.with_suffix(".done.json").read_text())
        return done

    def ours(self, job: Job) -> dict[str, Any]:
        """Do a job's steps with our own clients: the same calls with the same seeds."""
        self.jobs += 1
        name = f"own-{self.jobs}"
        with (
            TrainerClient.of(self.params) as trainer,
            EngineClient(self.params.url("engine"), self.local, "rollout", 600, 600) as engine,
        ):
            session = trainer.create_session(
                name, name, rank=job.rank, alpha=ALPHA, targets=self.targets(), seed=job.seed, holder=name,
                policy_config={}, owner="local", snapshot_ttl_s=3600,
            )  # fmt: skip
            served = trainer.export(session).served_name
            seconds, losses, tokens = [], [], 0
            for step in range(job.steps):
                began = time.monotonic()
                data = self._sampled(engine, served, job, step)
                tokens += sum(len(one.model_input.chunks[0].tokens) + 1 for one in data)
                found = trainer.forward_backward(session, data, "importance_sampling", {}, reduction="sum")
                adam = protocol.AdamParams(learning_rate=job.lr, beta1=0.9, beta2=0.95, eps=1e-12)
                losses.append(found["metrics"]["loss"])
                trainer.optim_step(session, adam.model_copy(update={"grad_clip_norm": 0.0}))
                served = trainer.export(session).served_name
                seconds.append(time.monotonic() - began)
            trainer.close_session(session)
        return {"seconds": seconds, "losses": losses, "tokens": tokens}

    def _sampled(self, engine: EngineClient, served: str, job: Job, step: int) -> list[protocol.Datum]:
        prompts = prompts_of(job, step)
        body = {"model": served, "n": job.group, "max_tokens": job.max_tokens, "stop": []}
        seeds = [job.seed_of(step, number) for number in range(len(prompts))]
        assert seeds == [seeds[0] + number * job.group for number in range(len(prompts))]
        groups = engine.samples({**body, "prompts": prompts, "seed": seeds[0]})["groups"]
        data = []
        for prompt, group in zip(prompts, groups, strict=True):
            drawn = group["samples"]
            given = advantages([one["tokens"] for one in drawn])
            data += [datum(prompt, one, value) for one, value in zip(drawn, given, strict=True)]
        return data

    def targets(self) -> list[str]:
        from engine.base.families import BaseShapes

        return list(BaseShapes.read(ensure_base(self.params.base, self.params.paths).path).targets)

    def loop(self, seed: int, steps: int) -> dict[str, Any]:
        """Train a policy of our own by Graftwork's loop."""
        from engine.training.loop import train

        self.jobs += 1
        config = PolicyConfig(
            task="addition", suite="addition-terse", steps=steps, groups=8, group_size=8, seed=seed
        )
        name = f"loop-{self.jobs}"
        params = self.params.model_copy(update={"policies": {name: config}})
        trained = train(params, name, config, self.local)
        return {"losses": [trained.digest]}

    def batched(self, job: Job) -> list[float]:
        """Return the seconds of one request for one sample of each prompt, for each step."""
        seconds = []
        with EngineClient(self.params.url("engine"), self.local, "rollout", 600, 600) as engine:
            for step in range(job.steps):
                body = {"model": job.base, "prompts": prompts_of(job, step), "max_tokens": job.max_tokens}
                began = time.monotonic()
                engine.samples({**body, "stop": []})
                seconds.append(time.monotonic() - began)
        return seconds


def datum(prompt: Sequence[int], sample: dict[str, Any], advantage: float) -> protocol.Datum:
    """Return a sample as the SDK's clients send it, in our own protocol."""
    whole = [*prompt, *sample["tokens"]]
    before = [0.0] * (len(prompt) - 1)
    columns = {
        "target_tokens": whole[1:],
        "logprobs": before + sample["logprobs"],
        "advantages": before + [advantage] * len(sample["tokens"]),
    }
    text = protocol.EncodedText(tokens=whole[:-1])
    return protocol.Datum(
        model_input=protocol.ModelInput(chunks=[text]),
        loss_fn_inputs={name: protocol.TensorData(data=values) for name, values in columns.items()},  # type: ignore[misc]
    )


@contextmanager
def live(given: Params, base: str) -> Iterator[Bench]:
    """Start engine, trainer and API, with nothing trained so far."""
    from tasks.steps import preload

    with tempfile.TemporaryDirectory(prefix="graftwork-tinker-") as root:
        given.paths.bases.mkdir(parents=True, exist_ok=True)
        (Path(root) / "bases").symlink_to(given.paths.bases)
        names = ("engine", "trainer", "controller", "mlflow", "prefect")
        settings: dict[str, Any] = {name: {"port": free_port()} for name in names}
        settings["engine"]["start_timeout_s"] = 900
        settings |= {"tinker": {"enabled": True, "port": free_port()}}
        params = Params.model_validate({"state_dir": root, "base": {"name": base}, **settings})
        os.environ.update(services.environment(params))
        preload()
        build = partial(ensure_base, params.base, params.paths)
        with services.session(params, build, told, ("engine", "trainer", "tinker")):
            (Path(root) / base).symlink_to(build().path)
            with whole_catalog(params.paths.catalog_url) as catalog:
                local = catalog.keys.ensure_local(params.paths.local_key)
                key = as_tinkers(catalog.keys.create("client", "tinker"))
            yield Bench(params, key, local, Path(root))


def overhead(
    run: Run, bench: Bench, arguments: argparse.Namespace, figures: record.Figures, share: float
) -> list[str]:
    """Add the figures of the SDK's steps and of ours; return why they did not learn the same."""
    sides: dict[str, Callable[[Job], dict[str, Any]]] = {"ours": bench.ours, "theirs": bench.theirs}
    sizes = {"steps": arguments.steps + 1, "prompts": 8, "group": 8, "max_tokens": 32}
    wrong = []

    def take(repeat: int) -> dict[str, float]:
        job = bench.job("steps", repeat + 1, **sizes)
        found = {name: sides[name](job) for name in record.in_turn(sides, repeat)}
        losses = {name: one["losses"] for name, one in found.items()}
        if not close(losses["theirs"], losses["ours"]):
            wrong.append(
                f"In repeat {repeat} the SDK's losses were {losses['theirs']}, ours {losses['ours']}."
            )
        # The first step of a client warms up.
        seconds = {name: sum(one["seconds"][1:]) / arguments.steps for name, one in found.items()}
        return {
            "overhead": seconds["theirs"] / seconds["ours"],
            "step_s": seconds["theirs"],
            "own_step_s": seconds["ours"],
            "tokens_per_s": found["theirs"]["tokens"] / sizes["steps"] / seconds["theirs"],
        }

    figures.add_pairs(run.pairs("steps, pair", take, BOUNDS, share=share, most=arguments.repeats))
    return wrong


def beside(
    run: Run, bench: Bench, arguments: argparse.Namespace, figures: record.Figures, share: float
) -> list[str]:
    """Add the figures of two clients and our loop at once; return who did not end as it does alone."""
    sizes = {"steps": arguments.steps, "prompts": 4, "group": 8, "max_tokens": 32}
    wrong = []

    def take(repeat: int) -> dict[str, float]:
        jobs = [bench.job("steps", 100 + 10 * repeat + number, **sizes) for number in range(2)]
        calls = [
            *(partial(bench.theirs, job) for job in jobs), partial(bench.loop, repeat, arguments.steps),
        ]  # fmt: skip
        ends, took = {}, {}
        for mode in record.in_turn(("one", "all"), repeat):
            began = time.monotonic()
            ends[mode] = in_parallel(*calls) if mode == "all" else [call() for call in calls]
            took[mode] = time.monotonic() - began
        for number, (alone, along) in enumerate(zip(ends["one"], ends["all"], strict=True)):
            if alone["losses"] != along["losses"]:
                wrong.append(
                    f"In repeat {repeat} number {number} had {along['losses']} beside others, alone "
                    f"{alone['losses']}."
                )
        return {"speedup": took["one"] / took["all"], "alone_s": took["one"], "beside_s": took["all"]}

    figures.add_pairs(run.pairs("at once, pair", take, BOUNDS, share=share, most=arguments.repeats))
    return wrong


def many(run: Run, bench: Bench, arguments: argparse.Namespace, figures: record.Figures) -> None:
    """Add the figures of many single samples."""
    sizes = {"prompts": arguments.singles, "group": 1, "max_tokens": 64}

    def take(repeat: int) -> dict[str, float]:
        # The first step of a client warms up.
        job = bench.job("singles", 7 + 2 * repeat, steps=2, **sizes)
        theirs = bench.theirs(job)["seconds"][1]
        ours = bench.batched(replace(job, seed=8 + 2 * repeat))[1]
        return {"singles": theirs / ours, "singles_s": theirs, "batched_s": ours}

    figures.add_pairs(run.pairs("singles, pair", take, BOUNDS, most=arguments.repeats))


def close(some: Sequence[float], others: Sequence[float]) -> bool:
    """Say whether losses are the same up to the rounding of a sum in another order."""
    return all(abs(one - other) <= 1e-5 * max(1.0, abs(one)) for one, other in zip(some, others, strict=True))


def told(name: str, state: str) -> None:
    print(f"  {name:<12}{state}", flush=True)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--base", default="tiny-dense")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--singles", type=int, default=256)
    parser.add_argument("--repeats", type=int, help="pairs, at most")
    arguments = parser.parse_args()
    run = Run("tinker", arguments.long)
    figures = record.Figures()
    with live(load_params(arguments.params), arguments.base) as bench:
        wrong = overhead(run, bench, arguments, figures, 0.4 if run.is_long else 1.0)
        if run.is_long:
            wrong += beside(run, bench, arguments, figures, 0.6)
            many(run, bench, arguments, figures)
    print(*wrong, sep="\n")
    record.report(run, figures, BOUNDS, not wrong, arguments.out)


if __name__ == "__main__":
    start(main)
