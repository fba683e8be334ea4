"""Two engines of one catalog as on two machines, on loopback, for the scale benchmark.

Each engine has its own state directory, spool, cache and way to S3. Postgres, S3, one controller and HAProxy
are shared. Every process can be killed, stopped and started again by itself.
"""

import itertools
import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import _made
import _served
import httpx
import psutil
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

from engine.base.resident import BaseInfo, ensure_base
from engine.catalog.catalog import Catalog, migrate
from engine.catalog.opening import whole_catalog
from engine.clients.controller import ControllerClient
from engine.ledger.ledger import open_snapshot
from engine.security.credentials import credential
from engine.services import lifecycle
from engine.settings.params import Params
from tests.helpers.haproxy import balanced
from tests.helpers.live import free_port, start_reaped, stop_reaped
from tests.helpers.postgres import fresh_database, postgres

BASE = "tiny-dense"
START_S = 300.0
BUCKET = "scale"
# Longer than any stream here, so that SIGTERM cuts none.
SHUTDOWN_S = 15


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
        file.write_text(self.params.to_json())
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

    def stop(self) -> None:
        """End the service, if it runs."""
        if self.process is not None:
            stop_reaped(self.process)
            self.process = None


@dataclass
class Cluster:
    """Two engines, a controller, and what they share; `url` is HAProxy's."""

    engines: tuple[Host, Host]
    controller: Host
    catalog: Catalog
    client: ControllerClient
    key: str
    url: str
    base: BaseInfo
    s3: Sequence["Bucket"]
    postmaster: int
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(0, 1000))

    def publish(self, policy: str, count: int, champion: bool = True) -> list[str]:
        """Publish fresh revisions of a policy and return their served names; the first is its champion."""
        shape = _served.SHAPES[BASE]
        params = self.controller.params
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
    """One machine's way to S3: a server of its own over the same objects."""

    def __init__(self) -> None:
        self.port = free_port()
        self._server: ThreadedMotoServer | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None


@contextmanager
def cluster(given: Params, beside: Path) -> Iterator[Cluster]:
    """Start the whole cluster in a directory of its own in `beside`; it ends with the block."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scale-", dir=beside)))
        # Its server writes a line for each request.
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        buckets = [Bucket() for _ in range(3)]
        for bucket in buckets:
            bucket.start()
            stack.callback(bucket.stop)
        os.environ.update(buckets[2].environment)
        S3FileSystem.clear_instance_cache()
        S3FileSystem().mkdir(BUCKET)
        address = stack.enter_context(postgres())
        postgres_url = fresh_database(address)
        folder = Path(parse_qs(urlsplit(address).query)["host"][0])
        postmaster = int((folder / "data" / "postmaster.pid").read_text().split()[0])
        migrate(postgres_url)
        port = free_port()
        shared = {
            "base": given.base.model_dump(mode="json"),
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
        controller = Host("controller", home, ("-m", "engine.controller"), variables)
        engines = []
        for number, bucket in enumerate(buckets[:2], 1):
            shape = _served.SHAPES[BASE]
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
        catalog = stack.enter_context(whole_catalog(postgres_url))
        key = catalog.keys.ensure_local(home.paths.local_key)
        client = stack.enter_context(ControllerClient(controller.url, key))
        for host in engines:
            wait_for(host.is_ready, f"{host.name} to be ready", START_S)
        url = stack.enter_context(balanced(home, [host.url for host in engines], root))
        first, second = engines
        yield Cluster((first, second), controller, catalog, client, key, url, base, buckets, postmaster)


def settings_of(root: Path, given: Params, sections: Mapping[str, Any]) -> Params:
    """Return the settings of a machine with a state directory of its own, on the bases of `given`."""
    root.mkdir(mode=0o700)
    given.paths.bases.mkdir(parents=True, exist_ok=True)
    (root / "bases").symlink_to(given.paths.bases)
    return Params.model_validate({"state_dir": str(root), **sections})


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = 60.0, every_s: float = 0.05) -> None:
    """Return once a condition holds; `RuntimeError` after the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"Waited {limit_s:g} s in vain for {what}.")
        time.sleep(every_s)
