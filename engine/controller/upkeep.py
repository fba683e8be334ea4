"""The chores of the loop besides its releases: what has expired or grown old is removed.

What is removed is gone: a clock that jumps forward removes nothing (`engine.clocks`).
"""

from engine.clocks import TrustedClock
from engine.controller.release_loop import Chore, Controller
from engine.ledger.purge import of_old
from engine.settings.params import Params

EXPIRE_S = 10.0
SWEEP_S = 3600.0
DAY_S = 86_400.0
# How long delivered notices and engines that are silent stay in the catalog.
NOTICES_DAYS, REPLICAS_DAYS = 90, 2
# Feedback may arrive before the observation of its answer, which is emitted when the answer ends.
AHEAD_S = 3600.0


def upkeep(params: Params, clock: TrustedClock | None = None) -> tuple[Chore, ...]:
    """Return the chores of a controller; their clock is by default the one of the state directory."""
    now = (clock or TrustedClock(params.paths.clock)).now

    def expire(controller: Controller) -> None:
        controller.catalog.lifecycle.expire(now())

    def sweep(controller: Controller) -> None:
        # A removal under way tells rows by their numbers, and counts those that are left.
        if controller.ledger and not controller.files.is_removing():
            # Only up to the last complete ingest: the spool may still hold the answer.
            controller.ledger.sweep(min(now(), controller.ingested_at) - AHEAD_S)

    def retain(controller: Controller) -> None:
        days, ledger = controller.params.controller.observations_days, controller.ledger
        if days and ledger and (removal := of_old(ledger, now() - days * DAY_S)):
            controller.files.start_removal("retention", removal)

    def tidy(controller: Controller) -> None:
        controller.catalog.notices.forget(now() - NOTICES_DAYS * DAY_S)
        controller.catalog.replicas.forget(now() - REPLICAS_DAYS * DAY_S)

    return (
        Chore("expire", EXPIRE_S, expire),
        Chore("sweep", SWEEP_S, sweep),
        Chore("retention", DAY_S, retain),
        Chore("tidy", DAY_S, tidy),
    )
