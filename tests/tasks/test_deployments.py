"""What a caller of a deployment may set."""

import shlex
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from prefect.flows import load_flow_from_entrypoint
from prefect.workers.process import ProcessJobConfiguration

from tasks.deployments import DEPLOYMENTS, job_template


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
async def test_a_run_takes_no_command_environment_or_folder_from_its_caller(
    given: dict, tmp_path: Path
) -> None:
    """As Prefect's worker reads a run's job variables; no value here needs its server."""
    template = job_template(tmp_path)
    found = await ProcessJobConfiguration.from_template_and_values(template, given, client=Mock())
    command = shlex.join([sys.executable, "-m", "flows.flow_run"])
    assert (found.command, found.env, found.working_dir) == (command, {}, tmp_path)


def test_every_deployment_is_a_flow_of_the_installed_package() -> None:
    for wanted in yaml.safe_load(DEPLOYMENTS.read_text())["deployments"]:
        found = load_flow_from_entrypoint(wanted["entrypoint"], use_placeholder_flow=False)
        assert found.name == wanted["name"]
