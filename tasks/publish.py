"""Publish what the ledger holds as an HTML report."""

from collections.abc import Mapping
from pathlib import Path

from engine.config import Params


def write_report(params: Params, path: Path, since: float, now: float, stages: Mapping[str, float]) -> Path:
    """Write the report of every policy in the catalog from `since` on (epoch seconds); return its path."""
    from engine.adapters.catalog import Catalog
    from engine.quality import report

    catalog = Catalog(params.paths.catalog_url)
    try:
        data = report.collect(
            params.paths.ledger_snapshot,
            catalog,
            [policy.name for policy in catalog.policies()],
            title="Graftwork",
            created_at=now,
            since=since,
            stages=stages,
            links={name: params.url(name) for name in ("prefect", "mlflow", "controller")},
        )
    finally:
        catalog.close()
    return report.write_report(data, path)
