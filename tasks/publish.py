"""Publish what the ledger holds as an HTML report."""

from collections.abc import Mapping
from pathlib import Path

from engine.settings.params import Params


def write_report(params: Params, path: Path, since: float, now: float, stages: Mapping[str, float]) -> Path:
    """Write the report from `since` on (epoch seconds), of the policies that changed last; return its path.

    Works from catalog and ledger snapshot alone: no service need run.
    """
    from engine.catalog.catalog import open_catalog
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
