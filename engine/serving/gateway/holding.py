"""The third stage: which revision answers, and its adapter in the host tier.

A cold adapter may take a minute. After each such wait the call is routed again and follows the routes as they
are then: it never reaches a revision that was rolled back, retired, purged or quarantined meanwhile. Nobody
waits for a canary: while it is not resident, another answers in its place.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from engine.catalog.records import served_name
from engine.errors import GraftworkError
from engine.serving.gateway.asgi import CLIENT_LEFT, Message, Receive, Refused
from engine.serving.gateway.call import Call, GatewayState
from engine.serving.gateway.routing import STALE_S, Router, Target
from engine.serving.residency.loads import BACKGROUND, INTERACTIVE

# So young is a look that need not be repeated.
LOOKED_S = 0.001
Done = TypeVar("Done")


async def route(call: Call) -> None:
    """Choose the revision that answers, as of now, or of a look of this very moment."""
    looks = time.perf_counter() - call.looked_at > LOOKED_S
    call.target, call.admitted_at = await call.state.router.admit(
        call.model, call.unit or call.id, call.purpose, call.key, looks
    )


async def hold(call: Call) -> None:
    """Hold the target's adapter in the host tier under `call.name`; the base needs none.

    The wait for a cold one ends when the client leaves. Raises what `Residency.hold` raises.
    """
    state = call.state
    router, residency = state.router, state.residency
    while True:
        if call.is_canary:
            if call.parent is None and (canary := await hold_canary(state, call.target)) is not None:
                call.name = canary
                return
            call.target = await instead_of(router, call.target)
        policy, digest = call.target.policy, call.target.digest
        if policy is None or digest is None:
            return
        seen = router.seen
        revision = await router.ask(router.revision, policy, digest)
        if seen != router.seen:
            # A thread read it, and something has changed meanwhile.
            await route(call)
            if call.target.digest != digest:
                continue
        if (warm := residency.tier.ask(revision)) is not None:
            call.name = warm
            return
        with state.meter.cold_load(call, served_name(policy, digest)):
            held = residency.hold(revision, INTERACTIVE if call.purpose == "user" else BACKGROUND)
            name = await unless_left(call.receive, held, residency.release)
        with ExitStack() as otherwise:
            otherwise.callback(residency.release, name, is_use=False)
            await residency.fetch.refuse_quarantined(revision)
            await route(call)
            if call.target.digest == digest:
                otherwise.pop_all()
                call.name = name
                return


async def unless_left(
    receive: Receive, work: Coroutine[Any, Any, Done], give_back: Callable[[Done], object]
) -> Done:
    """Return the result of `work`; cancel it and raise `Refused` (499) when the client disconnects first.

    `give_back` receives a result that nobody takes: of work that ends while this call is cancelled.
    """
    taken = False
    working: asyncio.Task[Done] = asyncio.create_task(work)
    # The body has been read, so the next message can only be the client's disconnect.
    left: asyncio.Future[Message] = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((working, left), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            taken = True
            return working.result()
        raise Refused(CLIENT_LEFT, "The client disconnected before the adapter was loaded.")
    finally:
        left.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
        if not taken and not working.cancelled() and working.exception() is None:
            give_back(working.result())


def release(call: Call) -> None:
    """End the hold, if there is one."""
    residency = call.state.residency
    if call.name is not None and residency.tier.release(call.name):
        residency.make_room(call.name)


async def instead_of(router: Router, canary: Target) -> Target:
    """Return who answers in a canary's place."""
    return await router.ask(router.instead_of, canary)


async def hold_canary(state: GatewayState, target: Target) -> str | None:
    """Hold a resident canary and return its served name; load another one ahead and return None."""
    # Whatever keeps it from being loaded, no user's request may fail by it.
    with suppress(GraftworkError):
        seen = state.router.seen
        revision = await state.router.ask(state.router.canary, target.policy or "", target.digest or "")
        if seen != state.router.seen or state.router.unread_s > STALE_S:
            # While it was read it may have been rolled back.
            return None
        if (name := state.residency.tier.ask(revision)) is not None:
            return name
        state.residency.load_ahead(revision)
    return None
