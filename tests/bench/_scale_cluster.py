"""Two engines of one catalog as on two machines, on loopback, for the scale benchmark.

Each engine has its own state directory, spool, cache and way to S3. Postgres, S3, one controller and HAProxy
are shared. Every process can be killed, stopped and started again by itself.
"""

import itertools
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qs, urlsplit

import _made
import _served
import httpx
import psutil
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import BaseWSGIServer, make_server

from engine.base.resident import BaseInfo, ensure_base
from engine.catalog.catalog import Catalog
from engine.catalog.opening import whole_catalog
from engine.clients.controller import ControllerClient
from engine.ledger.ledger import open_snapshot
from engine.security.credentials import credential
from engine.services import lifecycle
from engine.settings.params import Params
from tests.helpers import older_version
from tests.helpers.haproxy import balanced
from tests.helpers.live import free_port, start_reaped, stop_reaped
from tests.helpers.postgres import fresh_database, postgres

START_S = 300.0
BUCKET = "scale"
# Where the older version's tree is put, beside the machines' directories.
OLDER = "older"
# Longer than any stream here, so that SIGTERM cuts none.
SHUTDOWN_S = 15
# What begins an installation, run by the version that begins it.
BEGIN = """
import sys
from pathlib import Path
from engine.catalog.opening import open_catalog
from engine.settings.params import load_params
paths = load_params(Path(sys.argv[1])).paths
with open_catalog(paths, migrated=True) as catalog:
    catalog.keys.ensure_local(paths.local_key)
"""


@dataclass
class Host:
    """One machine: its settings and its one service, which may run or not."""

    name: str
    params: Params
    command: tuple[str, ...]
    environment: Mapping[str, str]
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return self.params.url("engine" if self.name.startswith("engine") else "controller")

    @property
    def log(self) -> Path:
        return self.params.paths.root / f"{self.name}.log"

    def start(self, wait: bool = True) -> None:
        """Start the service; return once it is healthy, or at once."""
        file = self.params.paths.root / "params.json"
        file.write_text(given_settings(self.params))
        with self.log.open("ab") as log:
            self.process = start_reaped([*self.command, "--params", str(file)], log, self.environment)
        if wait:
            wait_for(self.is_healthy, self.name, START_S)

    def is_healthy(self) -> bool:
        """Whether it answers; raises `RuntimeError` when it has ended."""
        if self.process is not None and self.process.poll() is not None:
            end = self.log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{self.name} ended with {self.process.returncode}:\n{end}")
        path = "/graftwork/marker" if self.name.startswith("engine") else "/health"
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}{path}", timeout=5).status_code == 200
        return False

    def is_ready(self) -> bool:
        """Whether an engine takes users."""
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/graftwork/ready", timeout=5).status_code == 200
        return False

    def running(self, key: str) -> float:
        """Return how many sequences an engine computes."""
        headers = {"authorization": f"Bearer {key}"}
        lines = httpx.get(f"{self.url}/metrics", headers=headers, timeout=10).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))

    def kill(self) -> None:
        """Kill the service and all that it started with SIGKILL."""
        assert self.process is not None
        root = psutil.Process(self.process.pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        self.process = None

    def terminate(self) -> None:
        """Send SIGTERM, as a supervisor does, and do not wait."""
        assert self.process is not None
        self.process.terminate()

    def trees(self) -> set[Path]:
        """Return where each of the service's processes finds this project's modules, by its environment.

        An engine's core writes its title over its own environment; it is a copy of its parent.
        """
        assert self.process is not None
        root = psutil.Process(self.process.pid)
        show = [sys.executable, "-c", "import engine; print(engine.__file__)"]
        found = set()
        for one in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                variables = one.environ()
                if "PATH" not in variables:
                    continue
                shown = subprocess.run(
                    show, env=variables, cwd=one.cwd(), capture_output=True, text=True, check=True
                )
                found.add(Path(shown.stdout.strip()).parents[1])
        return found

    def upgrade(self) -> None:
        """Run this version from the next start on."""
        self.environment = {
            **self.environment, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "PYTHONSAFEPATH": ""
        }  # fmt: skip

    def stop(self) -> None:
        """End the service, if it runs."""
        if self.process is not None:
            stop_reaped(self.process)
            self.process = None


@dataclass
class Cluster:
    """Two engines, a controller, and what they share; `url` is HAProxy's.

    `catalog` and `client` are of this version: where an older one began, once the catalog is migrated.
    """

    engines: tuple[Host, Host]
    controller: Host
    key: str
    url: str
    base: BaseInfo
    s3: Sequence["Bucket"]
    postgres: str
    postmaster: int
    at_end: ExitStack
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(0, 1000))

    @cached_property
    def catalog(self) -> Catalog:
        return self.at_end.enter_context(whole_catalog(self.controller.params.paths.catalog_url))

    @cached_property
    def client(self) -> ControllerClient:
        return self.at_end.enter_context(ControllerClient(self.controller.url, self.key))

    def publish(self, policy: str, count: int, champion: bool = True) -> list[str]:
        """Publish fresh revisions of a policy and return their served names; the first is its champion."""
        params = self.controller.params
        shape = shape_of(params)
        # No two policies have the same bytes.
        first = next(self.numbers)
        with closing(
            _made.Maker(params, self.base, policy, shape.rank, shape.torch_dtype, first=first)
        ) as maker:
            names = maker.make(count)
        for name in names:
            self.catalog.revisions.set_probe(
                policy, self.digest(name), {"accepted": True, "reason": "Made for this."}
            )
        if champion:
            route = self.catalog.routes.get(policy)
            self.catalog.routes.update(replace(route, champion=self.digest(names[0])), route.version)
        return names

    def digest(self, name: str) -> str:
        policy, _, digest = name.partition("@")
        return self.catalog.revisions.get(policy, digest).digest

    def release(self, name: str, settings: Mapping[str, Any], skip: Sequence[str] = ("score",)) -> str:
        """Start a release of a served name and return its id."""
        reasons = dict.fromkeys(skip, "It has no suite.")
        policy = name.partition("@")[0]
        return str(
            self.client.start_release(policy, self.digest(name), dict(settings), reasons, "bench")["id"]
        )

    def ledger(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Ask the ledger's snapshot."""
        with open_snapshot(self.controller.params.paths.ledger_snapshot) as ledger:
            return [tuple(row) for row in ledger.execute(query, list(values)).fetchall()]

    @contextmanager
    def paused_postgres(self) -> Iterator[None]:
        """Stop Postgres with SIGSTOP for the block: its kernel goes on acknowledging."""
        stopped = [psutil.Process(self.postmaster)]
        stopped += stopped[0].children(recursive=True)
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in reversed(stopped):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)


class Bucket:
    """One machine's way to S3: a server of its own over the same objects, but for those that `gone` names."""

    def __init__(self) -> None:
        self.port = free_port()
        self.gone: set[str] = set()
        self._server: BaseWSGIServer | None = None
        self._app = DomainDispatcherApplication(create_backend_app)

    def __call__(self, environment: dict[str, Any], start: Callable[..., Any]) -> Any:
        if any(name in environment["PATH_INFO"] for name in self.gone):
            start("503 Slow Down", [("content-length", "0")])
            return []
        return self._app(environment, start)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self) -> None:
        self._server = make_server("127.0.0.1", self.port, self, threaded=True)
        Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


@contextmanager
def cluster(given: Params, beside: Path, is_old: bool = False) -> Iterator[Cluster]:
    """Start the whole cluster in a directory of its own in `beside`; it ends with the block.

    `is_old`: every service, and the catalog, is of the version before the catalog's schema changed last.
    """
    with ExitStack() as stack:
        # Of the variables nothing stays that names what ends with the block.
        stack.callback(S3FileSystem.clear_instance_cache)
        stack.enter_context(patch.dict(os.environ))
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scale-", dir=beside)))
        # Its server writes a line for each request.
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        buckets = [Bucket() for _ in range(3)]
        for bucket in buckets:
            bucket.start()
            stack.callback(bucket.stop)
        os.environ.update(buckets[2].environment)
        S3FileSystem.clear_instance_cache()
        # The objects are this process's: an earlier cluster has made it.
        S3FileSystem().makedirs(BUCKET, exist_ok=True)
        address = stack.enter_context(postgres())
        postgres_url = fresh_database(address)
        folder = Path(parse_qs(urlsplit(address).query)["host"][0])
        postmaster = int((folder / "data" / "postmaster.pid").read_text().split()[0])
        port = free_port()
        shared = {
            "base": given.base.model_dump(mode="json", exclude_unset=True),
            "catalog": {"url": postgres_url},
            "store": {"url": f"s3://{BUCKET}/adapters"},
            "gateway": {"proxy_sets_id": True},
            # Nothing listens there.
            "mlflow": {"port": free_port()},
            "prefect": {"port": free_port()},
        }
        home = settings_of(root / "controller", given, shared | {"controller": {"port": port}})
        os.environ.update(lifecycle.environment(home))
        base = ensure_base(home.base, home.paths)
        secret = credential(home.paths, "events")
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
        if is_old:
            variables |= older_version.variables(older_version.older_version(root / OLDER))
        (home.paths.root / "params.json").write_text(given_settings(home))
        begin = [sys.executable, "-c", BEGIN, str(home.paths.root / "params.json")]
        subprocess.run(begin, env=variables, check=True)
        controller = Host("controller", home, ("-m", "engine.controller"), variables)
        engines = []
        for number, bucket in enumerate(buckets[:2], 1):
            shape = shape_of(given)
            sections = shared | {
                "controller": {"at": f"http://127.0.0.1:{port}"},
                "engine": {
                    "port": free_port(), "dtype": shape.dtype, "max_rank": shape.rank, "threads": 1,
                    "shutdown_s": SHUTDOWN_S, "max_num_seqs": 64,
                },
            }  # fmt: skip
            params = settings_of(root / f"engine-{number}", given, sections)
            params.paths.credentials.mkdir(mode=0o700)
            (params.paths.credentials / "events").write_text(secret)
            engines.append(
                Host(
                    f"engine-{number}", params, ("-m", "engine.serving.server"),
                    variables | bucket.environment,
                )
            )  # fmt: skip
        for host in (controller, *engines):
            stack.callback(host.stop)
            host.start(wait=False)
        for host in (controller, *engines):
            wait_for(host.is_healthy, host.name, START_S)
        key = home.paths.local_key.read_text().strip()
        for host in engines:
            wait_for(host.is_ready, f"{host.name} to be ready", START_S)
        url = stack.enter_context(balanced(home, [host.url for host in engines], root))
        first, second = engines
        yield Cluster((first, second), controller, key, url, base, buckets, address, postmaster, stack)


def shape_of(params: Params) -> _served.Shape:
    """Return how the base is served here; tests give tiny-dense as a directory."""
    return _served.SHAPES.get(params.base.name, _served.SHAPES["tiny-dense"])


def settings_of(root: Path, given: Params, sections: Mapping[str, Any]) -> Params:
    """Return the settings of a machine with a state directory of its own, on the bases of `given`."""
    root.mkdir(mode=0o700)
    given.paths.bases.mkdir(parents=True, exist_ok=True)
    (root / "bases").symlink_to(given.paths.bases)
    return Params.model_validate({"state_dir": str(root), **sections})


def given_settings(params: Params) -> str:
    """Return the settings that were given: an older version does not know every default of this one."""
    return params.model_dump_json(exclude_unset=True)


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = 60.0, every_s: float = 0.05) -> None:
    """Return once a condition holds; `RuntimeError` after the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"Waited {limit_s:g} s in vain for {what}.")
        time.sleep(every_s)
