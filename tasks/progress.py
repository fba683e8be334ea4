"""What a flow run shows in Prefect: tags, tables, links, progress, the sources of its settings.

Best effort: while Prefect's server is down, a call is retried for `PATIENCE_S`, then dropped.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from engine.catalog.records import served_name
from engine.files import write_whole
from engine.settings.params import DIGEST12, Params, Resolved
from engine.settings.policies import TAUGHT
from tasks.outcome import wait_row

OnStep = Callable[[Mapping[str, Any]], None]
PATIENCE_S = 60.0
# Prefect replaces all tags of a run at once.
tagging = threading.Lock()


def tag_run(*tags: str) -> None:
    """Add tags to the current flow run; does nothing outside one."""
    from prefect import get_client
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    run = context.flow_run.id

    def tag() -> None:
        with tagging, get_client(sync_client=True) as client:
            known = client.read_flow_run(run).tags
            client.update_flow_run(run, tags=[*dict.fromkeys([*known, *tags])])

    _patiently(tag)


def show_table(rows: Sequence[Mapping[str, Any]], key: str, description: str) -> None:
    """Publish rows as a table artifact under `key`."""
    from prefect.artifacts import create_table_artifact

    _patiently(lambda: create_table_artifact([dict(row) for row in rows], key, description))


def show_link(link: str, text: str, key: str) -> None:
    """Publish a link artifact under `key`."""
    from prefect.artifacts import create_link_artifact

    _patiently(lambda: create_link_artifact(link, text, key))


class WaitsTable:
    """Publishes what a policy's running release waits for, as a table artifact, whenever a gate changes."""

    def __init__(self, policy: str):
        self._policy, self._gates = policy, ""

    def __call__(self, release: Mapping[str, Any]) -> None:
        """Publish the table of a release's row if it waits for something else than before."""
        waits = release["waits"]
        gates = ", ".join(wait["gate"] for wait in waits)
        if waits and gates != self._gates:
            rows = [wait_row(wait) for wait in waits]
            show_table(rows, f"waits-{self._policy}", f"The release waits for: {gates}")
        self._gates = gates


def _patiently(call: Callable[[], Any]) -> None:
    from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

    again = Retrying(
        retry=retry_if_exception_type(httpx.TransportError),
        stop=stop_after_delay(PATIENCE_S),
        wait=wait_fixed(1),
        reraise=True,
    )
    with contextlib.suppress(httpx.TransportError):
        again(call)


def training_artifact(policy: str, total: int) -> OnStep:
    """Return a function that publishes a training step as a progress artifact of the current flow run."""
    from prefect.artifacts import create_progress_artifact, update_progress_artifact

    made: list[Any] = []

    def show(row: Mapping[str, Any]) -> None:
        progress, text = 100 * row["step"] / total, f"step {row['step']}: {told_reward(row)}"
        # While the server is down, the next step updates the artifact.
        with contextlib.suppress(httpx.TransportError):
            if made:
                update_progress_artifact(made[0], progress, text)
            else:
                made.append(create_progress_artifact(progress, f"training-{policy}", text))

    return show


def told_reward(row: Mapping[str, Any]) -> str:
    """Return a step's mean reward as text, without one its loss; GRPO has none where the verifier failed."""
    if row.get("loss_fn") in TAUGHT.values():
        held_out = row.get("held_out_loss")
        return f"loss {row['loss']:.3f}" + ("" if held_out is None else f"  held out {held_out:.3f}")
    return "no reward" if row["reward"] is None else f"reward {row['reward']:.2f}"


def both(first: OnStep, second: OnStep) -> OnStep:
    """Return a function that passes a step's row to `first`, then to `second`."""

    def show(row: Mapping[str, Any]) -> None:
        first(row)
        second(row)

    return show


def log_collapse(row: Mapping[str, Any]) -> None:
    """Write a step's warning of a collapse, if it has one, to the log of the current run."""
    if row.get("collapse"):
        from prefect.logging import get_run_logger

        get_run_logger().warning("Step %s: %s", row["step"], row["collapse"])


def keep_sources(params: Params, policy: str, digest: str, resolved: Resolved) -> None:
    """Record the settings of a revision's run with their sources, in `runs/` and as a table artifact."""
    values = resolved.config.model_dump(mode="json")
    rows = [
        {"setting": name, "value": json.dumps(value), "from": resolved.sources[name]}
        for name, value in values.items()
    ]
    path = params.paths.runs / f"{policy}-{digest[:DIGEST12]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"policy": policy, "revision": digest, "settings": rows}, indent=2) + "\n")
    show_table(rows, f"settings-{policy}", f"The settings of {served_name(policy, digest)}")
