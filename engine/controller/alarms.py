"""Alarms: what is wrong with a controller now, for `/status`, `/metrics` and the page."""

import shutil
import time
from contextlib import suppress

from engine.controller.release_loop import Controller
from engine.errors import NotFound
from engine.ledger.spool import REJECTED
from engine.threads import WORKS

LEAST_FREE = 1 << 30


def alarms(controller: Controller) -> dict[str, str]:
    """Return what is wrong now, by part: of the loop, the work beside it, champions, spool and disk."""
    faults = dict(controller.faults)
    # Some turns are a minute apart: one that failed is no alarm yet.
    failed = {name: work.error for name, work in list(WORKS.items()) if work.failed > 1}
    faults |= {name: f"{type(error).__name__}: {error}" for name, error in failed.items()}
    if controller.is_stalled():
        faults["loop"] = f"The last turn ended {time.monotonic() - controller.last_tick:.0f} s ago."
    for policy, (champion, why) in list(controller.lost.items()):
        # Once another one is champion, or the policy is purged, that is over.
        with suppress(NotFound):
            if controller.catalog.routes.get(policy).champion == champion:
                faults[f"champion of {policy}"] = why
    paths = controller.params.paths
    if rejected := len(list(paths.spool.glob(f"{REJECTED}/*"))):
        faults["spool"] = (
            f"{rejected} spool files hold lines that no ledger table accepts. They are in spool/{REJECTED}."
        )
    if (free := shutil.disk_usage(paths.root).free) < LEAST_FREE:
        faults["disk"] = f"{free / 2**30:.1f} GiB are free in {paths.root}. See `graftwork doctor`."
    return faults
