"""The server's end on SIGTERM: first its requests end, then the engine.

vLLM 0.32.0 goes on to accept requests while its engine drains, and answers them with 200 and no token. Ours
closes the port and idle connections at once, so that a load balancer sends its requests elsewhere.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from starlette.datastructures import State

POLL_S = 0.05
# For the engine to give its memory back, once nothing is under way.
TEARDOWN_S = 5.0
# For the last observations to reach a controller elsewhere.
HAND_OVER_S = 5.0
log = logging.getLogger("graftwork.leaving")


def end_requests_first(
    engine_client: Any,
    state: State,
    limit_s: float,
    before: Callable[[], object],
    settle: Callable[[], object],
    after: Callable[[], object],
) -> None:
    """Have vLLM's shutdown wait up to `limit_s` for the requests under way.

    Then `settle` runs on the event loop, and `after` in a thread.

    `state.server` is uvicorn's server by then. Bound: vLLM 0.32.0. Goes when vLLM closes its port first.
    """
    stock, loop, has_left = engine_client.shutdown, asyncio.get_running_loop(), False

    def shutdown(timeout: float | None = None) -> None:
        nonlocal has_left
        # vLLM calls it in a thread, and at its very end once more on the loop.
        if not has_left and not _is_on_loop():
            has_left = True
            before()
            asyncio.run_coroutine_threadsafe(leave(state.server, limit_s, settle, after), loop).result()
        stock(timeout=TEARDOWN_S if timeout is None else min(timeout, TEARDOWN_S))

    engine_client.shutdown = shutdown


async def leave(
    server: Any, limit_s: float, settle: Callable[[], object], after: Callable[[], object]
) -> None:
    """Accept no connection more, close those that are idle, and wait until the others have ended."""
    for listening in server.servers:
        listening.close()
    connections = server.server_state.connections
    for connection in list(connections):
        connection.shutdown()
    until = time.monotonic() + limit_s
    while connections and time.monotonic() < until:
        await asyncio.sleep(POLL_S)
    if connections:
        log.warning("%d connections are cut: their requests took over %g s.", len(connections), limit_s)
    settle()
    try:
        await asyncio.wait_for(asyncio.to_thread(after), HAND_OVER_S)
    except TimeoutError:
        log.warning("The last observations stay in the spool until the next start.")


def _is_on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
