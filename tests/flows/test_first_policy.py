"""The policy of docs/quickstart.md: what its users, its runs, MLflow and another installation show of it."""

import asyncio
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.adapters.revision import read_manifest
from engine.base.resident import ensure_base
from engine.catalog.opening import whole_catalog
from engine.catalog.records import served_name
from engine.settings.params import load_params
from tests.flows.conftest import Second
from tests.helpers import command_line
from tests.helpers.live import eventually, left_behind
from tests.helpers.operated import POLICY, Operated, write_settings
from tests.helpers.parity import Reference, ask, differences, prompts
from tests.helpers.repository import ROOT

pytestmark = [pytest.mark.heavy(minutes=9), pytest.mark.timeout(600)]


def test_a_jsonl_file_becomes_a_promoted_adapter(people: Operated, quickstart: str) -> None:
    """Users' ratings promoted it; what people decided later is another release."""
    with closing(whole_catalog(people.paths.catalog_url)) as catalog:
        first = min(catalog.releases.all(POLICY), key=lambda release: release.created_at)
    version = people.mlflow.get_model_version(POLICY, "1")
    assert (first.state, first.revision) == ("promoted", version.tags["graftwork.digest"])
    # No person did.
    assert first.approval is None


def test_runs_show_tags_and_artifacts(people: Operated, second: Second) -> None:
    tags = people.prefect.get(f"/flow_runs/{second.run}").json()["tags"]
    assert {f"policy:{POLICY}", f"revision:{second.name}"} <= set(tags)
    tables = people.artifacts("table")
    assert {f"{kind}-{POLICY}" for kind in ("revision", "settings", "verdict")} <= set(tables)
    assert people.artifacts("progress")[f"training-{POLICY}"] == 100
    links = people.all_artifacts(f"registry-{POLICY}")
    assert any(second.name in link for link in links)


def test_version_page_says_what_a_person_wants_to_know(people: Operated, quickstart: str) -> None:
    version = people.mlflow.get_model_version(POLICY, "1")
    for heading in ("Scores", "Verdict", "Lineage", "Learning curve", "Cost", "size"):
        assert heading in version.description, version.description
    assert version.tags["graftwork.probe"] == "accepted"
    assert version.tags["graftwork.verdict"] == "promote"
    model = people.mlflow.get_logged_model(version.source.removeprefix("models:/"))
    metrics = {metric.key: metric.value for metric in model.metrics or []}
    assert metrics[f"{POLICY}.mean"] == pytest.approx(float(version.tags["graftwork.score"]), abs=1e-4)


def test_downloaded_version_in_plain_peft_gives_the_served_log_probabilities(
    people: Operated, quickstart: str, tmp_path: Path
) -> None:
    import mlflow
    from peft import PeftModel

    # By arguments: other tests of this process leave MLflow's global settings behind.
    source, url = people.mlflow.get_model_version_download_uri(POLICY, "1"), people.url("mlflow")
    where = Path(mlflow.artifacts.download_artifacts(source, dst_path=str(tmp_path), tracking_uri=url))
    (config,) = where.rglob("adapter_config.json")
    name = served_name(POLICY, read_manifest(config.parent).digest)
    params = load_params(people.settings)
    base = ensure_base(params.base, params.paths).path
    plain, opened = Reference(base, None), Reference(base, None)
    opened.model = PeftModel.from_pretrained(opened.model, config.parent)
    requests = [(name, prompt) for prompt in prompts(8)]
    engine = SimpleNamespace(url=people.url("engine"), key=people.key)
    answers = asyncio.run(ask(engine, requests))
    assert {answer["revision"] for answer in answers} == {name}
    assert differences(requests, answers, {name: opened}).max() < 1e-4
    # The adapter must matter, or this proves nothing.
    assert differences(requests, answers, {name: plain}).max() > 1e-2


def test_version_serves_from_another_state(people: Operated, quickstart: str, tmp_path: Path) -> None:
    """As on another machine: its own catalog, store and key; MLflow is asked once, for the download."""
    name, question = people.answered_by(POLICY), "What is 31 + 46?"
    other = Operated(write_settings(tmp_path), tmp_path)
    digest = name.partition("@")[2]
    command = [sys.executable, "-m", "flows.cli", "serve", "--params", str(other.settings)]
    command += ["--revision", digest, "--registry", people.url("mlflow")]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as serving:
        try:
            said = []
            for line in serving.stdout or ():
                said.append(line)
                if " is served at " in line:
                    break
            assert serving.poll() is None, said
            with people.client() as here, other.client() as there:
                texts = [people.ask(client, name, question).json()["choices"] for client in (here, there)]
            assert texts[0] == texts[1]
        finally:
            # As Ctrl-C.
            serving.send_signal(signal.SIGINT)
    assert serving.returncode == 130
    assert eventually(lambda: not left_behind(tmp_path)), left_behind(tmp_path)
    assert any("Effect probe: Reproduced" in line for line in said)


@pytest.mark.parametrize(
    ("arguments", "code", "fault"),
    [
        (("--revision", "abcdef"), 5, "no revision 'abcdef'"),
        (("--revision", "oh no"), 2, "names no revision"),
        (("--revision", "abcdef", "--from", "/nowhere"), 5, "0 revisions"),
        (("--revision", "abcdef", "--registry", "{mlflow}"), 5, "no version"),
    ],
)
def test_what_cannot_be_served_is_a_sentence(
    people: Operated, tmp_path: Path, arguments: tuple[str, ...], code: int, fault: str
) -> None:
    given = [argument.format(mlflow=people.url("mlflow")) for argument in arguments]
    refused = command_line.graftwork("serve", *given, "--params", str(write_settings(tmp_path)))
    assert refused.returncode == code
    assert fault in refused.stderr
    assert "Traceback" not in refused.stderr
