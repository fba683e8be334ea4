"""Writes a model version's page in MLflow, which a person reads before promoting it.

The page is the version's description, tags and metrics, from the catalog and the ledger's snapshot.
Idempotent.
"""

import time
from typing import TYPE_CHECKING

from engine.catalog.opening import open_catalog
from engine.catalog.records import served_name
from engine.errors import ServiceError
from engine.ledger.ledger import open_ledger
from engine.report.quality import calibrated, quality, shown
from engine.report.why import VersionFacts, gather, moment, why
from engine.settings.params import Params

if TYPE_CHECKING:
    from mlflow import MlflowClient

BLOCKS = "▁▂▃▄▅▆▇█"


def update(params: Params, policy: str, digest: str, since: float = 0.0) -> None:
    """Refresh the page of a registered revision; does nothing for an unregistered one.

    `digest` may be shortened. Waits for a ledger snapshot newer than `since` (epoch seconds), at most as long
    as a working controller needs. Raises `NotFound` for an unknown revision and `ServiceError` when MLflow is
    down.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    from tasks.register import ensure_up, find_version

    url = params.url("mlflow")
    ensure_up(url)
    _await_snapshot(params, since)
    client = MlflowClient(tracking_uri=url, registry_uri=url)
    facts = gather(params, policy, digest)
    try:
        version = find_version(client, policy, facts.digest)
        if version is None:
            return
        client.update_model_version(policy, str(version), page(params, client, facts))
        for name, value in tags(facts).items():
            client.set_model_version_tag(policy, str(version), name, value)
        client.update_registered_model(policy, about(params, facts))
        _link_metrics(client, policy, version, facts)
    except MlflowException as error:
        raise ServiceError(f"MLflow at {url} refused the page of {policy}: {error}.") from None


def _await_snapshot(params: Params, since: float) -> None:
    """Wait until the snapshot is newer than `since` plus two ticks, at most two of its periods."""
    from engine.controller.release_loop import SNAPSHOT_S, TICK_S

    snapshot = params.paths.ledger_snapshot
    deadline = time.monotonic() + 2 * (TICK_S + SNAPSHOT_S)
    while time.monotonic() < deadline:
        if snapshot.is_file() and snapshot.stat().st_mtime > since + 2 * TICK_S:
            return
        time.sleep(0.1)


def tags(facts: VersionFacts) -> dict[str, str]:
    """Return the version's tags for searches: probe, score and verdict."""
    values = {"graftwork.probe": "accepted" if facts.probe.get("accepted") else "not accepted"}
    if facts.score:
        values["graftwork.score"] = f"{facts.score.mean:.4f}"
    if facts.verdicts:
        values["graftwork.verdict"] = facts.verdicts[0].verdict
    return values


def about(params: Params, facts: VersionFacts) -> str:
    """Return the registered model's description."""
    config = params.policy(facts.policy)
    return (
        f"Policy **{facts.policy}** of {config.owner}, suite `{config.suite}`, verifier `{config.verifier}`. "
        "Its aliases show what is served. Move `champion` to promote; set `canary` to start a release."
    )


def page(params: Params, client: "MlflowClient", facts: VersionFacts) -> str:
    """Return a version's description as Markdown: what `graftwork why` says, its relatives and its curve."""
    name = served_name(facts.policy, facts.digest)
    parts = [
        f"## {name}\n\nAs of {moment(time.time())}.",
        *(f"### {link.name.capitalize()}\n\n{_brief(link.says)}" for link in why(params, name).links),
        _quality(params, facts),
        _lineage(client, facts),
        _curve(facts),
        _cost(facts),
        f"[Releases and evidence]({params.url('controller')}/)",
    ]
    return "\n\n".join(part for part in parts if part)


def _brief(says: str) -> str:
    """Return the first lines of a list: MLflow's descriptions have 5,000 characters."""
    return "\n".join(says.split("\n")[:7])


def _quality(params: Params, facts: VersionFacts) -> str:
    """Return the revision's lines of `graftwork quality`: all items, then each segment."""
    with open_catalog(params.paths) as catalog, open_ledger(params.paths.ledger_snapshot) as ledger:
        found = quality(ledger, catalog, facts.policy, 1, facts.digest)
        said = calibrated(ledger, facts.policy)
    lines = [shown(row) for row in found if row.digest and row.score]
    if not lines:
        return ""
    cells = [list(lines[0]), ["---"] * len(lines[0]), *(list(line.values()) for line in lines)]
    table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in cells)
    return f"### Quality\n\n{table}\n\n{said}"


def _lineage(client: "MlflowClient", facts: VersionFacts) -> str:
    parent = _link(client, facts.policy, facts.parent) if facts.parent else "the base"
    children = ", ".join(_link(client, facts.policy, child) for child in facts.children) or "none"
    return f"### Lineage\n\nParent: {parent}. Children: {children}."


def _link(client: "MlflowClient", policy: str, digest: str) -> str:
    from tasks.register import find_version

    version, name = find_version(client, policy, digest), served_name(policy, digest)
    return f"[`{name}`](#/models/{policy}/versions/{version})" if version else f"`{name}`"


def _curve(facts: VersionFacts) -> str:
    line = "".join(BLOCKS[min(7, int(8 * reward))] for reward in facts.rewards)
    return line and f"### Learning curve\n\n`{line}`"


def _cost(facts: VersionFacts) -> str:
    seconds = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in facts.seconds.items())
    spent = f"{seconds or 'not known'}, {facts.tokens:,} trained tokens"
    return f"### Cost\n\n{spent}; size {facts.bytes:,} bytes."


def _link_metrics(client: "MlflowClient", policy: str, version: int, facts: VersionFacts) -> None:
    """Log the evaluation to the run, linked to the logged model that the version came from."""
    model_version = client.get_model_version(policy, str(version))
    # MLflow 3.17.2 loses `model_id` on the way; the source names the same logged model.
    scheme, _, model_id = str(model_version.source).partition(":/")
    if not (score := facts.score) or not model_version.run_id or scheme != "models":
        return
    named = {"mean": score.mean, "low": score.ci_low, "high": score.ci_high, "items": float(score.items)}
    for name, value in named.items():
        # The scores' own time: logging them again writes the same point.
        client.log_metric(
            model_version.run_id, f"{score.suite}.{name}", value, int(score.at * 1000), model_id=model_id
        )
