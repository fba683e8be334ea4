"""The process of a flow run: what Prefect's worker starts by itself, with imports that cost less.

    python -m flows.flow_run

Prefect's imports take 2.1 s of a core, and 1.3 s in this way. The run's number is in the environment.
"""

import runpy

from engine.lean_imports import lean_imports


def main() -> None:
    """Do as `python -m prefect.engine`."""
    with lean_imports():
        import prefect.flow_engine
        import prefect.main  # noqa: F401
    runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
