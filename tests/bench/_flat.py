"""Whether the memory of processes stays as it is while names come and go."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import psutil
from _density import pss

# A process whose memory grows with names is red from this on: less than the smallest object for each.
BYTES_A_NAME = 64
# What an allocator may keep and give back meanwhile: no more than this over the names of a whole run.
SLACK = 4 << 20
# Of the names, the first: caches and tiers fill up to their bounds.
WARM_UP = 0.3


@dataclass
class Memory:
    """Samples of each process's memory, by how many names it has seen."""

    names: list[int] = field(default_factory=list)
    bytes: dict[str, list[int]] = field(default_factory=dict)

    def sample(self, names: int, processes: Mapping[str, psutil.Process]) -> None:
        self.names.append(names)
        for process, one in processes.items():
            self.bytes.setdefault(process, []).append(pss(one.pid)["Pss"])

    def slopes(self) -> dict[str, float]:
        """Return by how many bytes a name each process grows once it has warmed up: a least-squares line."""
        names, of_each = self._settled()
        return {
            process: float(np.polyfit(names, values, 1)[0]) if len(names) > 1 else 0.0
            for process, values in of_each.items()
        }

    def growing(self) -> dict[str, float]:
        """Return the processes whose memory is not flat, with their bytes a name."""
        names, _ = self._settled()
        span = names[-1] - names[0]
        limit = max(BYTES_A_NAME * span, SLACK)
        return {process: slope for process, slope in self.slopes().items() if slope * span > limit}

    def _settled(self) -> tuple[Sequence[int], dict[str, list[int]]]:
        first = next(i for i, count in enumerate(self.names) if count >= WARM_UP * self.names[-1])
        return self.names[first:], {process: values[first:] for process, values in self.bytes.items()}


def titled(processes: Sequence[psutil.Process]) -> dict[str, psutil.Process]:
    """Return an engine's processes by what each of them is."""
    found: dict[str, psutil.Process] = {}
    for process in processes:
        title = title_of(process.cmdline() or [process.name()])
        found[title if title not in found else f"{title}_{process.pid}"] = process
    return found


def title_of(command: Sequence[str]) -> str:
    """Return what a process with this command line is."""
    if "::" in command[0]:
        return command[0].rpartition("::")[2]
    # The guard's command line has the server's in it.
    known = {"engine.process_reaper": "guard", "engine.serving.server": "api_server"}
    return next((title for module, title in known.items() if module in command), "helper")
