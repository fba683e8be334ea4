"""What a caller of a deployment may set."""

from unittest.mock import Mock

import pytest
from prefect.workers.process import ProcessJobConfiguration

from tasks.deployments import JOB_TEMPLATE, ROOT


@pytest.mark.parametrize(
    "given",
    [
        {"command": "touch here"},
        {"env": {"PYTHONPATH": "/tmp"}},
        {"env.PYTHONPATH": "/tmp"},
        {"working_dir": "/tmp"},
    ],
    ids=lambda given: next(iter(given)),
)
async def test_a_run_takes_no_command_environment_or_folder_from_its_caller(given: dict) -> None:
    """As Prefect's worker reads a run's job variables; no value here needs its server."""
    found = await ProcessJobConfiguration.from_template_and_values(JOB_TEMPLATE, given, client=Mock())
    assert (found.command, found.env, found.working_dir) == (None, {}, ROOT)
