"""Verify a revision: the live engine must reproduce its effect probe; the catalog keeps the result."""

import json
from typing import Any

from engine.config import Params, served_name
from engine.errors import AdapterError


def verify(params: Params, policy: str, digest: str, key: str) -> dict[str, Any]:
    """Run the effect probe of an exported revision and store its result; return it as stored.

    A refusal is a result with `accepted` false and its reason. Raises `AdapterError` when the revision has
    no probe, `NotFound` when the catalog does not know it, and `ServiceError` when the engine is away.
    """
    from pathlib import Path

    from engine.adapters.catalog import Catalog
    from engine.quality.probe import check, from_json

    catalog = Catalog(params.paths.catalog_url)
    try:
        revision = catalog.revision(policy, digest)
        file = params.paths.revision(policy, revision.digest) / "probe.json"
        if not file.is_file():
            raise AdapterError(
                f"{served_name(policy, revision.digest)} has no probe at {file}. Export it again."
            )
        probe = from_json(json.loads(file.read_text()))
        if (probe.digest, probe.base_digest) != (revision.digest, revision.base):
            raise AdapterError(f"{file} is the probe of another revision or base. Export the revision again.")
        served, base_name = served_name(policy, revision.digest), Path(params.base.name).name
        result = check(params.url("engine"), key, served, base_name, probe).to_json()
        catalog.set_probe(policy, revision.digest, result)
        return result
    finally:
        catalog.close()
