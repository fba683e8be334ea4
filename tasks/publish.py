"""Writes the HTML report of the installation."""

from collections.abc import Mapping
from pathlib import Path

from engine.settings.params import Params


def write_report(params: Params, path: Path, since: float, now: float, stages: Mapping[str, float]) -> Path:
    """Write the report of the policies that changed last, since `since` (epoch seconds); return its path.

    Reads the catalog and the ledger's snapshot; no service needs to run.
    """
    from engine.catalog.opening import open_catalog
    from engine.report import pages as report

    with open_catalog(params.paths) as catalog:
        data = report.collect(
            params.paths.ledger_snapshot,
            catalog,
            sorted(route.policy for route in catalog.routes.latest(report.MAX_POLICIES)),
            title="Graftwork",
            created_at=now,
            since=since,
            stages=stages,
            revisions_dir=params.paths.revisions,
            links={name: params.url(name) for name in ("prefect", "mlflow", "controller")},
        )
    return report.write_report(data, path)
