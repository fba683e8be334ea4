"""Engine, trainer and Tinker API as `graftwork up` starts them, and recipes of the cookbook on them."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tinker

from engine.base.resident import ensure_base
from engine.catalog.keys import as_tinkers
from engine.catalog.opening import whole_catalog
from engine.catalog.tinker_records import TinkerModel
from engine.services import lifecycle
from engine.settings.params import Params
from engine.training.service import state
from engine.training.service.session import state_file
from tests.helpers.live import free_port
from tests.helpers.repository import ROOT

SERVICES = ("engine", "trainer", "tinker")
BASE = "tiny-dense"
# The renderer that recipe_with_template registers.
TEMPLATE, WITH_TEMPLATE = "graftwork/template", str(Path(__file__).with_name("recipe_with_template.py"))
# An answer in any of the base's styles, and its end.
MOST_TOKENS = 12
# Pairs of numbers that no recipe here trains on, to measure how many sums are right.
HELD_OUT = [(x, y) for x in range(101) for y in range(101) if (31 * x + 17 * y) % 53 == 0]


@dataclass
class Installation:
    """Running services, a key of a tenant, and a directory in which the base's name is its tokenizer."""

    params: Params
    key: str
    home: Path

    @property
    def url(self) -> str:
        return self.params.url("tinker")

    @property
    def environment(self) -> dict[str, str]:
        given = {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": self.key, "TINKER_TELEMETRY": "0"}
        return os.environ | given

    def client(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=self.key)

    def start_recipe(self, recipe: str, log: str, **arguments: Any) -> "subprocess.Popen[bytes]":
        """Start a recipe as its page says; what it prints goes to `LOG.out`."""
        given = {
            "model_name": BASE,
            "renderer_name": TEMPLATE,
            "log_path": log,
            "behavior_if_log_dir_exists": "resume",
            **arguments,
        }
        command = [sys.executable, WITH_TEMPLATE, f"tinker_cookbook.recipes.{recipe}"]
        command += [f"{name}={value}" for name, value in given.items()]
        with (self.home / f"{log}.out").open("ab") as output:
            return subprocess.Popen(
                command, cwd=self.home, env=self.environment, stdout=output, stderr=subprocess.STDOUT
            )

    def recipe(self, recipe: str, log: str, **arguments: Any) -> list[dict[str, Any]]:
        """Run a recipe to its end; return its metrics, a row for each step."""
        status = self.start_recipe(recipe, log, **arguments).wait()
        assert status == 0, (self.home / f"{log}.out").read_text()[-4000:]
        return self.metrics(log)

    def metrics(self, log: str) -> list[dict[str, Any]]:
        return rows(self.home / log / "metrics.jsonl")

    def checkpoints(self, log: str) -> list[dict[str, Any]]:
        return rows(self.home / log / "checkpoints.jsonl")

    def steps_in(self, path: str) -> int:
        """Return how many steps the trainer has applied in a model until it saved this state."""
        with whole_catalog(self.params.paths.catalog_url) as catalog:
            model, kind, name = path.removeprefix("tinker://").split("/")
            found = catalog.tinker.find(TinkerModel, "acme", model)
            row = catalog.tinker.checkpoint("acme", model, kind, name)
        assert found
        assert row
        file = state_file(self.params.paths.sessions / found.policy, row.stored)
        return int(state.read_header(file)["step"])

    def kill(self, *names: str) -> None:
        """End services as by `kill -9`; the supervisor starts them again."""
        for service in lifecycle.status(self.params):
            if service.name in names and service.pid:
                # The supervisor's program is a reaper, and the service its child.
                for process in psutil.Process(service.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(signal.SIGKILL)

    def accuracy(self, sampler: tinker.SamplingClient) -> float:
        """Return the share of held-out sums that one sample of each gets right, as the recipe checks them."""
        from tinker_cookbook import renderers
        from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticEnv
        from tinker_cookbook.tokenizer_utils import get_tokenizer

        from tests.helpers import recipe_with_template

        tokenizer = get_tokenizer(str(self.home / BASE))
        renderer = renderers.get_renderer(recipe_with_template.NAME, tokenizer=tokenizer)
        params = tinker.SamplingParams(max_tokens=MOST_TOKENS, stop=renderer.get_stop_sequences())
        shown = ArithmeticEnv.standard_fewshot_prefix()
        envs = [ArithmeticEnv(x, y, renderer, shown) for x, y in HELD_OUT]
        prompts = [
            renderer.build_generation_prompt([*shown, {"role": "user", "content": env.get_question()}])
            for env in envs
        ]
        answers = [sampler.sample(prompt, 1, params) for prompt in prompts]
        told = [renderer.parse_response(list(one.result().sequences[0].tokens))[0] for one in answers]
        right = [env.check_answer(one["content"]) for env, one in zip(envs, told, strict=True)]
        return sum(right) / len(right)


def rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file; none when it is absent."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def write_sums(file: Path, lines: int) -> None:
    """Write conversations that end with a sum, shown as the recipe of arithmetic shows it."""
    draw, held = random.Random(3), set(HELD_OUT)
    with file.open("w") as output:
        for _ in range(lines):
            while (pair := (draw.randrange(101), draw.randrange(101))) in held:
                pass
            told = ("What is 4 + 5?", "9", f"What is {pair[0]} + {pair[1]}?", str(sum(pair)))
            messages = [
                {"role": role, "content": text}
                for role, text in zip(("user", "assistant") * 2, told, strict=True)
            ]
            output.write(json.dumps({"messages": messages}) + "\n")


@contextmanager
def installation(root: Path, **settings: Any) -> Iterator[Installation]:
    """Run the services in a state directory of their own, on the base that was built already."""
    bases = ROOT / ".graftwork" / "bases"
    bases.mkdir(parents=True, exist_ok=True)
    root.mkdir(parents=True, exist_ok=True)
    (root / "bases").symlink_to(bases)
    ports = {name: {"port": free_port()} for name in ("engine", "trainer", "controller", "mlflow", "prefect")}
    tinker_port = {"tinker": {"enabled": True, "port": free_port()}}
    params = Params.model_validate(
        {"state_dir": root, "base": {"name": BASE}, **ports, **tinker_port, **settings}
    )

    def report(_name: str, _said: str) -> None:
        return

    def build() -> object:
        return ensure_base(params.base, params.paths)

    with lifecycle.session(params, build, report, SERVICES):
        with whole_catalog(params.paths.catalog_url) as catalog:
            key = as_tinkers(catalog.keys.create("acme", "tinker", ["acme-*"]))
        home = root / "home"
        home.mkdir()
        (home / BASE).symlink_to(build().path)
        yield Installation(params, key, home)
