"""Many idle policies resident: memory for each, time to wake one from disk, to switch, and to save one.

    graftwork bench policies [--base tiny-dense] [--policies 32] [--rank 8] [--rounds 20]

A trainer in a process of its own, asked over HTTP. Memory is what its resident set grows by for each policy
that holds factors, gradients and Adam moments, beside what is computed from their shapes. Then the trainer
is killed and started again, so that every policy lies on disk: the first `forward` wakes it, a second one
does not. A switch is what `forward_backward` takes longer when the policy before was another one, in CPU
seconds of the trainer. Every policy must export the same bytes before and after.
"""

import argparse
import json
import re
import shutil
import tempfile
import time
from pathlib import Path

import _record as record
import psutil

from engine.base.families import BaseShapes
from engine.base.resident import ensure_base
from engine.settings.params import BaseConfig, Paths, load_params
from engine.training.model.adapter import sites_of
from engine.training.service.capacity import bytes_of
from engine.training.service.protocol import SessionInfo
from tests.helpers.live import free_port
from tests.helpers.trainer_service import ADAM, Service, data

FIGURES = (
    "bytes_for_each_computed",
    "bytes_for_each_measured",
    "wake_s",
    "switch_s",
    "switch_share",
    "save_s",
)
BOUNDS = dict.fromkeys(FIGURES, record.at_most())
# Calls of each of two policies in one round.
CALLS = 16
# Policies that are trained before memory is looked at, so that libraries have all that they keep.
WARM = 4


def start(base: Path, state: Path) -> Service:
    file = state / "params.json"
    trainer = {"port": free_port(), "session_bytes": 1 << 34}
    file.write_text(json.dumps({"state_dir": str(state), "base": {"name": str(base)}, "trainer": trainer}))
    service = Service(load_params(file), file)
    service.start()
    service.client.health()
    return service


def resident(service: Service) -> int:
    assert service.process
    return int(psutil.Process(service.process.pid).memory_info().rss)


def open_policy(service: Service, number: int, rank: int, targets: list[str]) -> SessionInfo:
    """Open a session and bring it to the middle of its second step: factors, gradients, moments."""
    session = service.client.create_session(
        f"bench-{number}", f"bench-{number}", rank=rank, alpha=2.0 * rank, targets=targets, seed=number,
        holder="bench", policy_config={"suite": "x"},
    )  # fmt: skip
    for step in range(2):
        service.client.forward_backward(session, data(step))
        if step == 0:
            service.client.optim_step(session, ADAM)
    return session


def operation_seconds(service: Service, kind: str) -> tuple[float, float]:
    """Return the seconds of all operations of a kind by the trainer's own clock, and how many they are."""
    text = service.client.http.get("/metrics").text
    found = re.findall(rf'operation_seconds_(sum|count){{kind="{kind}"}} (\S+)', text)
    named = {name: float(value) for name, value in found}
    return named.get("sum", 0.0), named.get("count", 0.0)


def mean_seconds(service: Service, kind: str, work) -> float:
    before = operation_seconds(service, kind)
    work()
    after = operation_seconds(service, kind)
    return (after[0] - before[0]) / (after[1] - before[1])


def cpu_seconds(service: Service) -> float:
    """Return the CPU seconds of the trainer's threads: the first number of schedstat, in ns."""
    assert service.process
    tasks = Path(f"/proc/{service.process.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def switches(
    service: Service, first: SessionInfo, second: SessionInfo, rounds: int
) -> tuple[float, list[float]]:
    """Return the CPU seconds of a forward_backward of one policy, and what a switch adds in each round."""
    alone, added = [], []
    orders = {"same": (first,) * CALLS + (second,) * CALLS, "turns": (first, second) * CALLS}
    for number in range(rounds):
        took = {}
        for name in record.in_turn(orders, number):
            began = cpu_seconds(service)
            for session in orders[name]:
                service.client.forward_backward(session, data(1))
            took[name] = cpu_seconds(service) - began
        alone.append(took["same"] / (2 * CALLS))
        # Of the calls in turns all but one follow another policy's, of the others one does.
        added.append((took["turns"] - took["same"]) / (2 * CALLS - 2))
    return record.median(alone), added


def wakes(service: Service, sessions: list[SessionInfo]) -> list[float]:
    """Return the seconds that each session's first forward takes beyond a second one."""
    found = []
    for session in sessions:
        took = []
        for _ in range(2):
            began = time.perf_counter()
            service.client.forward(session, data(1))
            took.append(time.perf_counter() - began)
        found.append(took[0] - took[1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="tiny-dense")
    parser.add_argument("--policies", type=int, default=32)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--out", type=Path, default=Path(".graftwork/bench"))
    given = parser.parse_args()
    base = ensure_base(BaseConfig(name=given.base), Paths(load_params(given.params).state_dir))
    shapes = BaseShapes.read(base.path)
    computed = sum(bytes_of(site, given.rank) for site in sites_of(shapes).values())
    folder = Path(tempfile.mkdtemp())
    service = start(base.path, folder)
    try:
        targets = list(shapes.targets)
        sessions = [open_policy(service, number, given.rank, targets) for number in range(WARM)]
        before = resident(service)
        sessions += [
            open_policy(service, number, given.rank, targets) for number in range(WARM, WARM + given.policies)
        ]
        measured = (resident(service) - before) / given.policies
        update_s, added = switches(service, *sessions[:2], given.rounds)
        names = [f"state-{number}" for number in range(given.rounds)]
        save_s = mean_seconds(
            service, "save_state", lambda: [service.client.save_state(sessions[0], name) for name in names]
        )
        digests = [service.client.export(session).digest for session in sessions]
        service.kill()
        service.start()
        service.client.health()
        waking = wakes(service, sessions)
        again = [service.client.export(session).digest for session in sessions]
    finally:
        service.stop()
        shutil.rmtree(folder, ignore_errors=True)
    figures = {
        "policies": [float(given.policies)],
        "bytes_for_each_computed": [float(computed)],
        "bytes_for_each_measured": [measured],
        "wake_s": waking,
        "forward_backward_cpu_s": [update_s],
        "switch_s": added,
        "switch_share": [seconds / update_s for seconds in added],
        "save_s": [save_s],
    }
    found = record.Figures()
    found.add(figures, f".{given.base}")
    right = digests == again and len(set(digests)) == len(digests)
    record.report("policies", found.values, BOUNDS, found.spreads, right, given.out)


if __name__ == "__main__":
    main()
