"""Train a policy every night when it is due: schedule it, then ask Prefect for the next runs.

    eval "$(graftwork login --shell)"
    python examples/nightly.py

`nightly.cron` and `nightly.timezone` in params.yaml set the time; `graftwork up` installs a change. A policy
is due when it has new data, when its newest revision is too old, or when users rate it below its score.
"""

import subprocess
import sys

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
from prefect.client.schemas.sorting import FlowRunSort

# Settings that are not given stay as they are.
subprocess.run(
    [
        sys.executable, "-m", "flows.cli", "policy", "create", "adder", "--data", "examples/sums.jsonl",
        "--verifier", "python:examples.verifier:judge", "--scheduled", "--max-age-s", "86400",
    ],
    check=True,
)  # fmt: skip
nightly = DeploymentFilter.model_validate({"name": {"any_": ["nightly"]}})
scheduled = FlowRunFilter.model_validate({"state": {"type": {"any_": ["SCHEDULED"]}}})
with get_client(sync_client=True) as client:
    runs = client.read_flow_runs(
        deployment_filter=nightly,
        flow_run_filter=scheduled,
        sort=FlowRunSort.EXPECTED_START_TIME_ASC,
        limit=3,
    )
for run in runs:
    print(f"nightly runs at {run.expected_start_time:%Y-%m-%d %H:%M} UTC")
