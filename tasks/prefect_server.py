"""Prefect's server behind a Host allow-list, on the address of the settings.

    python -m tasks.prefect_server --params FILE

`prefect server start` (3.7.7) takes neither an allow-list nor a certificate.
"""

import argparse
from functools import partial
from pathlib import Path

from engine.security.http import server_options, trusted
from engine.settings.params import load_params

CONNECTIONS = 100


def main() -> None:
    """Run Prefect's server until it is stopped."""
    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.settings import get_current_settings

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", required=True, type=Path, help="resolved settings (YAML or JSON)")
    listener = load_params(parser.parse_args().params).listener("prefect")
    widen_pool()
    # As `prefect server start` runs it.
    api = get_current_settings().server.api
    uvicorn.run(
        trusted(create_app(final=True), listener),
        timeout_keep_alive=api.keepalive_timeout,
        ws_ping_interval=api.websocket_ping_interval,
        ws_ping_timeout=api.websocket_ping_timeout,
        log_level="warning",
        **server_options(listener),
    )


def widen_pool() -> None:
    """Give Prefect's SQLite database as many connections as there may be requests.

    It has one writer, and each other that would write waits with a connection for up to a minute. Of
    SQLAlchemy's 15 none was then left for reads, or for the writer's own second session, and the server stood
    still. Prefect 3.7.7 has no setting for it with SQLite.
    """
    from prefect.server.database import configurations

    stock = configurations.create_async_engine
    configurations.create_async_engine = partial(stock, pool_size=CONNECTIONS)


if __name__ == "__main__":
    main()
