"""The process of a flow run, which Prefect's worker starts in place of `python -m prefect.engine`.

    python -m flows.flow_run

It does the same, but imports Prefect in 1.3 s of a core instead of 2.1. The run's id is in the environment.
"""

import runpy

from engine.lean_imports import lean_imports


def main() -> None:
    """Run the flow run that the environment names."""
    with lean_imports():
        import prefect.flow_engine
        import prefect.main  # noqa: F401
    runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
