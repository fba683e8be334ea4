"""Where the time goes: CPU seconds and peak memory of processes, and which phase of a flow used them."""

import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

SAMPLE_S = 0.02
# What no phase covers: preparation, and what waits for nobody's turn.
OTHER = "other"
FLOWS = "flows"


def members(roots: Mapping[str, int]) -> dict[str, list[psutil.Process]]:
    """Return each service's processes, and this one as `FLOWS`."""
    found = {FLOWS: [psutil.Process()]}
    for name, pid in roots.items():
        root = psutil.Process(pid)
        found[name] = [root, *root.children(recursive=True)]
    return found


def cpu_seconds(processes: Mapping[str, list[psutil.Process]]) -> dict[str, float]:
    """Return user and system seconds of each group since its processes started."""
    return {name: sum(sum(one.cpu_times()[:2]) for one in group) for name, group in processes.items()}


def reset_peaks(processes: Mapping[str, list[psutil.Process]]) -> None:
    """Let the kernel count every process's peak memory from now on."""
    for group in processes.values():
        for one in group:
            Path(f"/proc/{one.pid}/clear_refs").write_text("5")


def peak_bytes(processes: Mapping[str, list[psutil.Process]]) -> int:
    """Return the sum of the peaks since the reset."""
    texts = [Path(f"/proc/{one.pid}/status").read_text() for group in processes.values() for one in group]
    return sum(int(re.findall(r"VmHWM:\s+(\d+) kB", text)[0]) * 1024 for text in texts)


@dataclass
class Account:
    """Phases as they happen, and samples of what each group of processes had used by then."""

    processes: Mapping[str, list[psutil.Process]]
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    _done: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample until the block ends."""
        thread = threading.Thread(target=self._sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()

    def _sample(self) -> None:
        self.samples.append(self._now())
        while not self._done.wait(SAMPLE_S):
            self.samples.append(self._now())
        self.samples.append(self._now())

    def _now(self) -> tuple[float, dict[str, float]]:
        """Return the time and what each group has used; what this thread used is no work of the flows."""
        used = cpu_seconds(self.processes)
        return time.monotonic(), used | {FLOWS: used[FLOWS] - time.thread_time()}

    def watched(self, call: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """Return the call with its time counted to a phase."""

        def timed(*given: Any, **named: Any) -> Any:
            began = time.monotonic()
            try:
                return call(*given, **named)
            finally:
                self.spans.append((phase, began, time.monotonic()))

        return timed

    def wall(self) -> dict[str, float]:
        """Return each phase's seconds, summed over the policies."""
        found: dict[str, float] = defaultdict(float)
        for phase, began, ended in self.spans:
            found[phase] += ended - began
        return dict(found)

    def used(self) -> dict[str, float]:
        """Return the CPU seconds of each group over the whole account."""
        first, last = self.samples[0][1], self.samples[-1][1]
        return {name: last[name] - first[name] for name in last}

    def by_phase(self) -> dict[str, float]:
        """Return CPU seconds of all groups by phase; phases at the same time share what was used."""
        found: dict[str, float] = defaultdict(float)
        for (before, was), (after, now) in zip(self.samples, self.samples[1:], strict=False):
            middle = (before + after) / 2
            active = [phase for phase, began, ended in self.spans if began <= middle < ended] or [OTHER]
            for phase in active:
                found[phase] += (sum(now.values()) - sum(was.values())) / len(active)
        return dict(found)
