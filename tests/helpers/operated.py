"""The services as people use them: `graftwork up`, deployments through Prefect's API, users with answers."""

import json
import os
import random
import re
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import yaml

from engine.clients.prefect import PrefectLogin
from engine.security.credentials import USER, known_credential, logins
from engine.settings.params import Paths
from tests.helpers import command_line
from tests.helpers.document_blocks import PORTS, RUN, RUN_UP, marked, run, scratch
from tests.helpers.live import free_port
from tests.helpers.repository import ROOT

# Its blocks make a policy of a person's own data, which other tests ask.
QUICKSTART, POLICY = ROOT / "docs" / "quickstart.md", "my-sums"
SERVICES = ("engine", "trainer", "controller", "mlflow", "prefect")
# The phrasings of one sum; the tiny base answers one of them as the bare number.
PHRASINGS = ("{0} =", "Calculate {0} for me.", "What is {0}?", "Find {0}.")
ENDS = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def write_settings(state: Path, **changes: Any) -> Path:
    """Write settings with free ports, a state directory of their own, and the base that was built already."""
    bases = ROOT / ".graftwork" / "bases"
    bases.mkdir(parents=True, exist_ok=True)
    (state / "bases").symlink_to(bases)
    data = yaml.safe_load((ROOT / "params.yaml").read_text())
    data |= {name: {"port": free_port()} for name in SERVICES}
    data |= {"state_dir": str(state), "suites_dir": str(state / "suites")} | changes
    path = state / "settings.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def write_sums(path: Path, lines: int) -> None:
    """Write a person's data: sums in words, each with its answer."""
    draw, rows = random.Random(5), {}
    while len(rows) < lines:
        a, b = draw.randint(10, 99), draw.randint(10, 99)
        rows[a, b] = {"question": draw.choice(PHRASINGS).format(f"{a} + {b}"), "answer": str(a + b)}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))


class Patient(httpx.HTTPTransport):
    """Asks again when Prefect's server answers that it is busy, as its own clients do."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        for pause in (0.5, 1, 2, 4, 8, 16):
            response = super().handle_request(request)
            if response.status_code != 503:
                return response
            time.sleep(pause)
        return response


@dataclass
class Operated:
    """Running services and the clients of the people who use them."""

    settings: Path
    state: Path

    @cached_property
    def data(self) -> dict[str, Any]:
        return yaml.safe_load(self.settings.read_text())

    def url(self, service: str) -> str:
        return f"http://127.0.0.1:{self.data[service]['port']}"

    @property
    def paths(self) -> Paths:
        return Paths(self.state)

    @cached_property
    def key(self) -> str:
        return (self.state / "local.key").read_text().strip()

    @cached_property
    def prefect(self) -> httpx.Client:
        login = PrefectLogin(USER, known_credential(self.paths, "prefect"))
        return httpx.Client(
            base_url=f"{self.url('prefect')}/api", timeout=120, transport=Patient(), auth=login
        )

    @cached_property
    def controller(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {known_credential(self.paths, 'controller')}"}
        return httpx.Client(base_url=self.url("controller"), timeout=20, headers=headers)

    @cached_property
    def mlflow(self) -> Any:
        from mlflow import MlflowClient

        os.environ.update(logins(self.paths))
        return MlflowClient(self.url("mlflow"), self.url("mlflow"))

    def deployment(self, name: str) -> dict[str, Any]:
        return self.prefect.get(f"/deployments/name/{name}/{name}").raise_for_status().json()

    def start(self, deployment: str, **form: Any) -> httpx.Response:
        """Start a deployment as the UI's Run form does."""
        body = {"parameters": {"form": form}, "state": {"type": "SCHEDULED"}}
        body["idempotency_key"] = str(uuid.uuid4())
        at = f"/deployments/{self.deployment(deployment)['id']}/create_flow_run"
        return self.prefect.post(at, json=body)

    def state_of(self, run: str) -> dict[str, Any]:
        return self.prefect.get(f"/flow_runs/{run}").raise_for_status().json()["state"]

    def wait(self, run: str, *until: str, seconds: float = 240) -> dict[str, Any]:
        """Return a flow run's state once it has ended, or has one of these names."""
        deadline = time.monotonic() + seconds
        while (state := self.state_of(run))["type"] not in ENDS and state["name"] not in until:
            assert time.monotonic() < deadline, f"{run} is still {state}"
            time.sleep(0.3)
        return state

    def run(self, deployment: str, **form: Any) -> str:
        """Start a deployment and return its run's id once it has completed."""
        run = self.start(deployment, **form).raise_for_status().json()["id"]
        state = self.wait(run)
        assert state["type"] == "COMPLETED", (deployment, state["message"])
        return run

    def artifacts(self, kind: str) -> dict[str, Any]:
        """Return the data of Prefect's newest artifacts of a kind, by key."""
        body = {"limit": 200, "sort": "UPDATED_DESC"}
        found = self.prefect.post("/artifacts/filter", json=body).raise_for_status().json()
        return {one["key"]: one["data"] for one in reversed(found) if one["type"] == kind}

    def all_artifacts(self, key: str) -> list[Any]:
        """Return the data of every artifact under a key."""
        body = {"artifacts": {"key": {"any_": [key]}}, "limit": 200}
        return [one["data"] for one in self.prefect.post("/artifacts/filter", json=body).json()]

    def ask(self, client: httpx.Client, policy: str, question: str) -> httpx.Response:
        body = {
            "model": policy, "messages": [{"role": "user", "content": question}], "max_tokens": 24,
            "temperature": 0, "user": str(uuid.uuid4()),
        }  # fmt: skip
        return client.post("/chat/completions", json=body).raise_for_status()

    def answered_by(self, policy: str) -> str:
        """Return the revision that answers a policy's users now."""
        with self.client() as client:
            return self.ask(client, policy, "1 + 2 =").headers["x-graftwork-revision"]

    def client(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=f"{self.url('engine')}/v1", headers=headers, timeout=60)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `graftwork` on these services, in this process."""
        return command_line.graftwork(*arguments, "--params", str(self.settings))

    def example(self, name: str) -> str:
        """Run a file of examples/ as its first lines say, on these services; return what it prints."""
        interpreter = "sh" if name.endswith(".sh") else sys.executable
        variables = {
            "GRAFTWORK_PARAMS": str(self.settings),
            "OPENAI_BASE_URL": f"{self.url('engine')}/v1",
            "OPENAI_API_KEY": self.key,
            "PREFECT_API_URL": f"{self.url('prefect')}/api",
            **logins(self.paths),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        done = subprocess.run(
            [interpreter, f"examples/{name}"], cwd=ROOT, env=os.environ | variables, text=True, timeout=300,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def page(self, path: Path, scratch_in: Path) -> None:
        """Run the marked blocks of a page on these services, in a directory that looks like the checkout."""
        checkout = scratch(scratch_in / "checkout", self.settings, self.state, self.state / "suites")
        ports = {name: self.data[name]["port"] for name in PORTS}
        run(marked(path, RUN, RUN_UP), checkout, ports, timeout_s=1000)


def skeleton(text: str) -> str:
    """Return a program's output without what differs from run to run.

    Those are digests, ages, numbers, paths and widths.
    """
    different = (
        (r"\b[0-9a-f]{12,64}\b", "DIGEST"), (r"\S*/\S+", "PATH"), (r"\b\d+[smhd]\b", "AGE"),
        (r"\d[\d,.]*", "0"),
    )  # fmt: skip
    for pattern, instead in different:
        text = re.sub(pattern, instead, text)
    return "\n".join(" ".join(line.split()) for line in text.splitlines())


def graftwork(*arguments: str, settings: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [sys.executable, "-m", "flows.cli", *arguments, "--params", str(settings)]
    environment = os.environ | {"COLUMNS": "200"}
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False, env=environment
    )
