"""MLflow's server in one process, on the address of the settings.

    python -m tasks.mlflow_server --params FILE

`mlflow server` (3.17.2) prepares database and login, and then starts uvicorn in a second process, which
imports everything once more: four seconds of a core, and 270 MB for a first process that only waits.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from engine.settings.params import Params, load_params


def main() -> None:
    """Run MLflow's server until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", required=True, type=Path, help="resolved settings (YAML or JSON)")
    params = load_params(parser.parse_args().params)
    # MLflow has its allow-list of hosts, an environment variable, only where uvicorn is imported already.
    import uvicorn  # noqa: F401
    from mlflow import server
    from mlflow.cli import cli

    server._exec_cmd = serve
    cli.main(["server", *options(params)])


def options(params: Params) -> list[str]:
    """Return the options of `mlflow server`; `own_environments` has what the environment says."""
    listener = params.listener("mlflow")
    tls = "--ssl-certfile {} --ssl-keyfile {}"
    return [
        "--serve-artifacts", "--artifacts-destination", str(params.paths.mlartifacts), "--workers", "1",
        "--host", str(listener.listen), "--port", str(listener.port), "--app-name", "basic-auth",
        *(("--uvicorn-opts", tls.format(*listener.tls)) if listener.tls else ()),
    ]  # fmt: skip


def serve(cmd: Sequence[str], **given: Any) -> NoReturn:
    """Serve here what MLflow would start another process for: `python -m uvicorn OPTIONS`."""
    from uvicorn.main import main as run_uvicorn

    os.environ.update(given["extra_env"])
    sys.exit(run_uvicorn(cmd[3:], standalone_mode=False))


if __name__ == "__main__":
    main()
