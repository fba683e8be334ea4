"""Verifies a revision: it is served only if the live engine reproduces its effect probe.

The catalog stores the result. A refusal writes a verdict to the ledger, with the module most likely at fault,
and a tombstone; a later accepted probe lifts that tombstone. The controller writes both, or this process
where none runs.
"""

import json
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.base.families import BaseShapes
from engine.catalog.records import served_name
from engine.errors import AdapterError, GraftworkError
from engine.settings.params import Params

if TYPE_CHECKING:
    from engine.catalog.catalog import Catalog, Revision
    from engine.quality.probe import Probe, ProbeResult
    from engine.verification.fault_localization import FaultLocation

# A running trainer answers at once; a refusal does not wait long for one that is down.
PATIENCE_S = 5.0


def verify(params: Params, policy: str, digest: str, key: str) -> dict[str, Any]:
    """Run the effect probe of an exported revision, store its result and return it.

    `key` is an admin key. A refusal is a result with `accepted` false, a reason and the module most likely at
    fault. Raises `AdapterError` for a revision without a probe, `NotFound` for an unknown revision, and
    `ServiceError` when the engine, or the controller that serves the catalog, is down.
    """
    from engine.catalog.opening import open_catalog
    from engine.quality.probe import check

    with open_catalog(params.paths) as catalog:
        revision = catalog.revisions.get(policy, digest)
        probe = _shipped(params, revision)
        served = served_name(policy, revision.digest)
        result = check(params.url("engine"), key, served, Path(params.base.name).name, probe)
        # A refused load names its module, and a wrong base is not a module's fault.
        if not (result.accepted or result.is_base or result.module or result.base_error > result.tolerance):
            fault = _locate(params, catalog, revision, probe, key, result.tolerance)
            reason = f"{result.reason} {fault.says}"
            result = replace(result, reason=reason, module=fault.module, errors=fault.errors)
        record(params, catalog, revision, result, key)
    return result.to_json()


def _shipped(params: Params, revision: "Revision") -> "Probe":
    from engine.publishing.importing import serving_dtype
    from engine.quality.probe import from_json

    file = params.paths.revision(revision.policy, revision.digest) / "probe.json"
    if not file.is_file():
        raise AdapterError(
            f"{served_name(revision.policy, revision.digest)} has no probe at {file}. Export it again."
        )
    probe = from_json(json.loads(file.read_text()))
    if (probe.digest, probe.base_digest) != (revision.digest, revision.base):
        raise AdapterError(f"{file} belongs to another revision or base. Export the revision again.")
    serving = serving_dtype(params)
    if probe.dtype != serving:
        # The dtype decides the tolerance, so the probe must not choose it.
        raise AdapterError(
            f"{file} was recorded in {probe.dtype}, but the engine serves {serving}. Export it again."
        )
    return probe


def _locate(
    params: Params, catalog: "Catalog", revision: "Revision", probe: "Probe", key: str, tolerance: float
) -> "FaultLocation":
    """Return the module at fault; if it cannot be found, a sentence that says why."""
    from engine.adapters.revision import read_revision
    from engine.publishing.publish import stored_tensors
    from engine.quality.probe import UNKNOWN, asking
    from engine.store.open import open_store
    from engine.training.service.client import TrainerClient
    from engine.verification.adapter_ablation import AdapterAblation, trainer_reference
    from engine.verification.fault_localization import FaultLocation, locate_fault

    try:
        base = BaseShapes.read(Path(catalog.bases.get(revision.base).path))
        with (
            tempfile.TemporaryDirectory(dir=params.state_dir) as scratch,
            closing(open_store(params)) as store,
            closing(TrainerClient.of(params, patience_s=PATIENCE_S)) as trainer,
            asking(params.url("engine"), key) as engine,
        ):
            shipped, _ = read_revision(params.paths.revision(revision.policy, revision.digest), revision.base)
            served = stored_tensors(catalog, store, revision)
            reference = trainer_reference(trainer, revision, probe, Path(scratch))
            ablation = AdapterAblation(
                catalog, store, revision, base, probe, engine, Path(params.base.name).name, reference
            )
            return locate_fault(served, shipped, ablation.compare, tolerance)
    except GraftworkError as fault:
        return FaultLocation(UNKNOWN, f"The module at fault could not be found: {fault}", {})


def record(params: Params, catalog: "Catalog", revision: "Revision", result: "ProbeResult", key: str) -> None:
    """Store a probe's result, through the controller when it runs; raises what `verify` raises."""
    from engine.clients.controller import ControllerClient
    from engine.controller.route_changes import alone, controller_serves

    policy, digest = revision.policy, revision.digest
    if controller_serves(catalog):
        with ControllerClient(params.url("controller"), key) as controller:
            return controller.record_probe(policy, digest, result.to_json())
    with alone(params, catalog) as changes:
        changes.record_probe(policy, digest, result)
