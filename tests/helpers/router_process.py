"""vLLM's own router from its wheel, with the arguments of deploy/vllm-router.service."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx

from engine.process_reaper import die_with_parent
from tests.helpers.live import free_port

UNIT = Path(__file__).parents[2] / "deploy" / "vllm-router.service"
START_S = 60.0
# What the test chooses itself.
OWN = {"--host": 1, "--port": 1, "--worker-urls": None}


def arguments() -> list[str]:
    """Return the arguments of the unit file, without address and engines."""
    command = UNIT.read_text().replace("\\\n", " ").partition("ExecStart=")[2].partition("\n")[0]
    words, kept, is_own = shlex.split(command)[1:], list[str](), False
    for word in words:
        if word.startswith("--"):
            is_own = word in OWN
        if not is_own:
            kept.append(word)
    return kept


@contextmanager
def routed(engines: Sequence[str], folder: Path, given: Sequence[str]) -> Iterator[str]:
    """Run the router in front of these engines with the given arguments and yield its URL."""
    port = free_port()
    command = [
        sys.executable, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-port", str(free_port()), "--prometheus-host", "127.0.0.1", "--worker-urls", *engines,
        *given,
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with (folder / "vllm-router.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, preexec_fn=partial(die_with_parent, os.getpid())
        )
    try:
        deadline = time.monotonic() + START_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                said = (folder / "vllm-router.log").read_text(errors="replace")
                raise RuntimeError(f"vLLM's router did not start:\n{said[-3000:]}")
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    return False
