"""Processes of a test's own functions: several at once, or one that is killed."""

from multiprocessing import get_context

# Each is a fork of a server that has imported what most need and has no threads. A spawned one imports it
# anew, for a second of a core, but has the variables of the test: a fork has those of the server's start.
children = get_context("forkserver")
children.set_forkserver_preload(
    [
        "engine.catalog.opening",
        "engine.ledger.ledger",
        "engine.metering.usage_log",
        "engine.store.open",
        "pytest",
    ]
)
