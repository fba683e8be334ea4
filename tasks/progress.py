"""What a flow run shows of itself in Prefect: tags, training progress, where its settings come from.

Outside a flow run (a test, a DVC stage) there is nothing to show it on, and nothing is done.
"""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from engine.config import DIGEST12, Params, Resolved

OnStep = Callable[[Mapping[str, Any]], None]


def tag_run(*tags: str) -> None:
    """Add tags to the flow run that calls this."""
    from prefect import get_client
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    with get_client(sync_client=True) as client:
        known = client.read_flow_run(context.flow_run.id).tags
        client.update_flow_run(context.flow_run.id, tags=[*dict.fromkeys([*known, *tags])])


def training_artifact(policy: str, total: int) -> OnStep:
    """Return a function that shows a training step as a progress artifact of the running flow."""
    from prefect.artifacts import create_progress_artifact, update_progress_artifact

    made: list[Any] = []

    def show(row: Mapping[str, Any]) -> None:
        progress, text = 100 * row["step"] / total, f"step {row['step']}: reward {row['reward']:.2f}"
        if made:
            update_progress_artifact(made[0], progress, text)
        else:
            made.append(create_progress_artifact(progress, f"training-{policy}", text))

    return show


def both(first: OnStep, second: OnStep) -> OnStep:
    def show(row: Mapping[str, Any]) -> None:
        first(row)
        second(row)

    return show


def keep_sources(params: Params, policy: str, digest: str, resolved: Resolved) -> None:
    """Keep the settings of a revision's run, each with where it comes from, in `runs/` and as a table."""
    from prefect.artifacts import create_table_artifact

    values = resolved.config.model_dump(mode="json")
    rows = [
        {"setting": name, "value": json.dumps(value), "from": resolved.sources[name]}
        for name, value in values.items()
    ]
    path = params.paths.runs / f"{policy}-{digest[:DIGEST12]}.json"
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft.write_text(json.dumps({"policy": policy, "revision": digest, "settings": rows}, indent=2) + "\n")
    draft.replace(path)
    create_table_artifact(rows, f"settings-{policy}", f"The settings of {policy}@{digest[:DIGEST12]}")
