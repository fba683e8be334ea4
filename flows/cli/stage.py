"""Runs one stage of dvc.yaml; `.dvc/stage` calls it.

python -m flows.cli.stage NAME
"""

import os
from typing import Literal

import typer

from engine.process_reaper import die_with_parent
from flows.cli.command import main
from flows.entry import PARAMS, ParamsFile, check, enter

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def stage(
    name: Literal["base", "suites", "adapt", "revision", "evaluate", "report"], params: ParamsFile = PARAMS
) -> None:
    """Run one stage of dvc.yaml."""
    settings = enter(params)
    check(settings, [settings.evaluate.policy])
    from flows import display
    from tasks import evaluation, stage_evaluate, stage_files, stages

    # The stage's services must end with DVC, also when it is killed.
    die_with_parent(os.getppid())
    if name == "base":
        with display.base_bar() as progress:
            stages.build_base(settings, progress)
    elif name == "suites":
        stages.prepare_suites(settings)
    elif name == "adapt":
        with display.live():
            stages.adapt(settings, display.print_service, display.training_bar)
    elif name == "revision":
        stages.take_revision(settings)
    elif name == "evaluate":
        stage_evaluate.evaluate(settings, display.print_service)
    else:
        files = stages.files_of(settings)
        evaluation.write_report(params.absolute().parent, files.report, stage_files.opened_suite(files))


if __name__ == "__main__":
    main(app)
