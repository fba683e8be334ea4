"""Requests of a benchmark, when they arrive, and the client that sends them in a process of its own."""

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from engine.process_reaper import die_with_parent

DEADLINE_S = 300.0
# Token ids of prompts: what every base's vocabulary has, without special ones.
VOCABULARY = range(5, 300)


@dataclass(frozen=True)
class Server:
    """Where requests go; `key` is a bearer token."""

    url: str
    key: str


@dataclass(frozen=True)
class Ask:
    """A request that arrives `at` seconds after its plan began.

    `burst`: it is one of the storm's; `logprobs`: its tokens' log-probabilities are asked for too.
    """

    at: float
    model: str
    prompt: tuple[int, ...] | str
    tokens: int
    burst: bool = False
    logprobs: bool = False


@dataclass(frozen=True)
class Answer:
    """What came of a request; times in seconds since its plan began, 0 where it did not get so far.

    `refused` counts its 429s, each with a `Retry-After` that was waited for. `fault` is empty for a 200.
    `logprobs` are of `ids`, in nats, where they were asked for.
    """

    ask: Ask
    sent: float
    first: float
    done: float
    status: int
    refused: int
    ids: tuple[int, ...]
    fault: str
    logprobs: tuple[float, ...] = ()

    @property
    def ttft(self) -> float:
        """Return seconds from the arrival to the first token, whenever it was sent; infinite without one."""
        return self.first - self.ask.at if self.first else math.inf

    @property
    def is_right(self) -> bool:
        """Say whether it ended in 200 with every token."""
        return self.status == 200 and not self.fault and len(self.ids) == self.ask.tokens


def prompt(chance: random.Random, length: int) -> tuple[int, ...]:
    return tuple(chance.choices(VOCABULARY, k=length))


def arrivals(chance: random.Random, rate: float, seconds: float) -> list[float]:
    """Return the times of a Poisson process of `rate` a second."""
    times = [chance.expovariate(rate)]
    while times[-1] < seconds:
        times.append(times[-1] + chance.expovariate(rate))
    return times[:-1]


class Client:
    """The client's process, for the `with` block."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("_client.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def ask(self, server: Server, asks: Sequence[Ask], under_way: int = 0) -> list[Answer]:
        """Send every request at its time, at most `under_way` at once (0: no limit); return when all ended.

        Each has `DEADLINE_S` for its answer.
        """
        assert self._process.stdin
        assert self._process.stdout
        plan = {
            "url": server.url,
            "key": server.key,
            "at_once": under_way,
            "deadline_s": DEADLINE_S,
            "asks": [[ask.at, ask.model, ask.prompt, ask.tokens, ask.logprobs] for ask in asks],
        }
        self._process.stdin.write(json.dumps(plan).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"The load client ended with {self._process.wait(10)}.")
        found = json.loads(line)
        self.wall_s += found["wall_s"]
        self.cpu_s += found["cpu_s"]
        return [
            Answer(ask, sent, first, done, status, refused, tuple(ids), fault, tuple(logprobs))
            for ask, (sent, first, done, status, refused, ids, fault, logprobs) in zip(
                asks, found["answers"], strict=True
            )
        ]

    @property
    def cpu_share(self) -> float:
        """Return the share of all cores that the client used while it sent."""
        return self.cpu_s / (self.wall_s * len(os.sched_getaffinity(0))) if self.wall_s else 0.0
