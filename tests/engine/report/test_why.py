"""Looking: what `ls`, `why` and `status` know of policies, revisions and answers, and what they do not."""

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.catalog.catalog import Base, Catalog, Notice, Release, Replica, migrate
from engine.controller.advance import Wait
from engine.errors import Conflict, NotFound
from engine.ledger.ledger import Ledger, Spool
from engine.report.why import Chain, commit_link, why
from engine.settings.params import Params
from engine.settings.releases import ReleaseConfig
from engine.settings.services import ControllerConfig, MlflowConfig
from engine.version import code_version
from tasks import look
from tests.helpers import command_line
from tests.helpers.live import free_port
from tests.helpers.repository import ROOT
from tests.helpers.rows import NEW, OLD, THIRD, fill

NAMES = ["revision", "verdict", "scores", "items", "run", "data", "commit"]
GONE = "dd" * 32


def emit(spool: Spool) -> None:
    for digest, right in ((None, 3), (OLD, 6), (NEW, 9)):
        for item in range(10):
            spool.emit("scores", policy="sorting" if digest else None, digest=digest, base="base",
                       item=f"{item}", suite="sorting-json", suite_version="2",
                       score=float(item < right), answer="yes" if item < right else "",
                       question=f"Is  {item}\na `b`?" if digest else None,
                       segment="few" if item < 7 else None)  # fmt: skip
    for step in (1, 2):
        spool.emit("train_steps", policy="sorting", session="line-1", step=step, digest=GONE, reward=step / 2,
                   tokens=100, rollout_s=1.0, reward_s=0.0, update_s=2.0, handoff_s=0.5)  # fmt: skip
    spool.emit("verdicts", policy="sorting", digest=NEW, verdict="promote", reason="It is better.", by="ada")
    spool.emit("route_changes", policy="sorting", version=7, by="ada", reason="A canary of 20%.")
    common = {"policy": "sorting", "key": "k", "status": 200, "purpose": "user", "completion_tokens": 5}
    spool.emit("observations", id="chat-1", digest=NEW, arm="canary", unit="u-1", route_version=7, **common)
    spool.emit("feedback", request_id="chat-1", reward=0.5, key="k")
    spool.emit("observations", id="chat-base", digest=None, arm="base", **common)
    spool.emit("observations", id="chat-gone", digest=GONE, arm="pin", **common)


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """A champion with a parent, of which users, a suite and a training run are known; nothing runs."""
    # What answers is a thread of this process, and stands still with it.
    monkeypatch.setattr(look, "TIMEOUT_S", 60.0)
    params = Params(
        state_dir=tmp_path / "state",
        mlflow=MlflowConfig(port=free_port()),
        controller=ControllerConfig(port=free_port()),
    )
    migrate(params.paths.catalog_url)
    catalog = Catalog(params.paths.catalog_url)
    catalog.bases.add(Base("base", "tiny-dense", "/bases/tiny", 1.0))
    fill(catalog, champion=None)
    catalog.revisions.add_many(
        [replace(catalog.revisions.get("sorting", THIRD), digest="ab" * 32, parent=NEW, created_at=9.0)]
    )
    catalog.routes.update(replace(catalog.routes.get("sorting"), champion=NEW, previous=OLD), 0)
    catalog.tombstones.add("sorting", THIRD, "It shouts.", "ann")
    catalog.close()
    manifest = params.paths.revisions / "sorting" / NEW[:12] / "manifest.json"
    manifest.parent.mkdir(parents=True)
    config = {"session": "line-1", "task": "sorting", "contract": "json", "line_seed": 3, "seed": 1}
    body = {
        "digest": NEW, "base_digest": "base", "policy": "sorting", "parent": None, "step": 2, "rank": 8,
        "targets": ["q_proj"], "tensor_count": 2, "bytes": 64, "code_version": "0.1.0+gabc123.dirty",
        "config": config, "created_at": 1.0,
    }  # fmt: skip
    manifest.write_text(json.dumps(body))
    spool = Spool(params.paths.spool, "test")
    emit(spool)
    spool.close()
    ledger = Ledger(params.paths.ledger)
    ledger.ingest(params.paths.spool)
    ledger.snapshot(params.paths.ledger_snapshot)
    ledger.close()
    return params


def said(chain: Chain) -> dict[str, str]:
    return {link.name: link.says for link in chain.links}


def test_an_answer_leads_back_to_the_commit(params: Params) -> None:
    chain = why(params, "chat-1")
    assert (chain.policy, chain.digest) == ("sorting", NEW)
    assert [link.name for link in chain.links] == ["answer", *NAMES]
    assert all(link.known for link in chain.links)
    facts = {link.name: link.facts for link in chain.links}
    assert (facts["answer"]["arm"], facts["answer"]["unit"], facts["answer"]["reward"]) == (
        "canary", "u-1", 0.5,
    )  # fmt: skip
    assert facts["answer"]["route"]["reason"] == "A canary of 20%."
    assert facts["revision"]["role"] == "champion"
    assert [item["by"] for item in facts["verdict"]["verdicts"]] == ["ada"]
    assert facts["scores"]["revision"]["mean"] == 0.9
    assert facts["scores"]["base"]["mean"] == 0.3
    assert (facts["run"]["session"], facts["run"]["steps"], facts["run"]["tokens"]) == ("line-1", 1, 100)
    assert facts["run"]["seconds"] == {"rollout wait": 1.0, "reward": 0.0, "update": 2.0, "handoff": 0.5}
    assert said(chain)["run"] == (
        "Training line-1: 1 step, mean reward 50% to 50%, 3.5 s a step; 4 s in total."
    )
    assert facts["data"]["suite_versions"] == {"sorting-json": "2"}
    assert facts["data"]["judged_by"] == "json"
    assert facts["commit"] == {"version": "0.1.0", "commit": "abc123", "dirty": True}


@pytest.mark.parametrize("subject", [f"sorting@{NEW[:6]}", NEW, NEW[:8], "sorting"])
def test_a_revision_is_named_in_four_ways(params: Params, subject: str) -> None:
    chain = why(params, subject)
    assert (chain.digest, [link.name for link in chain.links]) == (NEW, NAMES)


def test_won_and_lost_items_have_both_answers(params: Params) -> None:
    """The champion's are those against the champion before it; the others' against the champion."""
    link = next(link for link in why(params, "sorting").links if link.name == "items")
    assert (link.facts["against"], link.facts["won"], link.facts["lost"]) == (OLD, 3, 0)
    assert link.says.splitlines() == [
        f"3 won and 0 lost of 10 against the previous champion {OLD[:12]}.",
        "- won 6 (few): `Is 6 a 'b'?` → `yes`, the other nothing",
        "- won 7: `Is 7 a 'b'?` → `yes`, the other nothing",
        "- won 8: `Is 8 a 'b'?` → `yes`, the other nothing",
    ]
    assert [one["score"] for one in link.facts["won_items"]] == [1.0] * 3
    before = next(link for link in why(params, f"sorting@{OLD}").links if link.name == "items")
    assert (before.facts["against"], before.facts["lost"]) == (NEW, 3)
    assert f"against the champion {NEW[:12]}" in before.says


def test_what_is_not_known_is_said(params: Params) -> None:
    chain = why(params, f"sorting@{THIRD}")
    known = {link.name: link.known for link in chain.links}
    assert known == dict.fromkeys(NAMES, False) | {"revision": True}
    says = said(chain)
    assert "ann: It shouts." in says["revision"]
    assert says["verdict"] == "It has no verdict yet."
    assert says["scores"] == "It was not scored on sorting-json."
    assert says["items"] == f"No item has a score of both it and the champion {NEW[:12]}."
    assert says["run"] == "This machine has no manifest of it."


def test_an_answer_of_the_base_and_one_of_an_expired_step_are_explained(params: Params) -> None:
    base = why(params, "chat-base")
    assert base.digest is None
    assert "had no champion" in said(base)["revision"]
    assert "base 30.0%" in said(base)["scores"]
    gone = why(params, "chat-gone")
    assert gone.digest == GONE
    assert "training steps expire" in said(gone)["revision"]
    assert "Step 1 of training line-1" in said(gone)["run"]


def test_a_running_release_is_the_verdict_so_far(params: Params) -> None:
    catalog = Catalog(params.paths.catalog_url)
    settings = ReleaseConfig().model_dump()
    row = Release("r", "sorting", NEW, OLD, "canary", 0.2, "running", settings, 1.0, 1.0, reason="Wait.")
    catalog.releases.add(row)
    catalog.notices.add(Notice("n", "graftwork.engine.down", "", None, "It is away.", "/", 1.0))
    catalog.switches.set("freeze", True)
    catalog.replicas.join(Replica("h:1", "http://h:1", NEW, "1", "i", 0, 0.0, draining=True))
    catalog.close()
    assert said(why(params, "sorting"))["verdict"] == "Its release is running, at step 'canary'. Wait."
    standing = look.standing(params)
    assert standing["frozen"]
    assert standing["releases"] == [
        {"revision": f"sorting@{NEW[:12]}", "step": "canary", "reason": "Wait.", "waits": []}
    ]
    assert [notice["reason"] for notice in standing["notices"]] == ["It is away."]
    (engine,) = standing["engines"]
    assert (engine["id"], engine["base"], engine["draining"]) == ("h:1", NEW[:12], True)
    assert 0 <= engine["beat_s"] < 60
    (line,) = look.shown_releases(standing["releases"])
    assert (line["gate"], line["has"]) == ("canary", "Wait.")
    waits = [Wait("canary 20%: reward", "open", "clear", 75.0, 340.0).row()]
    with answering(params.controller.port, [{"id": "r", "waits": waits}]):
        (line,) = look.shown_releases(look.standing(params)["releases"])
    assert (line["release"], line["since"], line["ends"]) == (f"sorting@{NEW[:12]}", "1m", "hold in 340 s")


def test_unknown_and_ambiguous_names_are_sentences(params: Params) -> None:
    with pytest.raises(NotFound, match=r"answer.*'poems'"):
        why(params, "poems")
    with pytest.raises(NotFound, match="has no revision"):
        why(params, "sorting@123456")
    catalog = Catalog(params.paths.catalog_url)
    catalog.revisions.add_many([replace(catalog.revisions.get("sorting", NEW), digest=NEW[:10] + "c" * 54)])
    catalog.close()
    with pytest.raises(Conflict, match=r"digests.*'bbbbbb'"):
        why(params, "bbbbbb")


def test_commits_are_read_from_the_code_version() -> None:
    assert commit_link("0.1.0+gabc").facts == {"version": "0.1.0", "commit": "abc", "dirty": False}
    assert not commit_link("0.1.0").known
    assert not commit_link("").known


def test_the_code_version_names_this_checkouts_commit() -> None:
    root = ROOT
    if not (root / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    assert f"+g{commit}" in code_version()


def test_lists_show_scores_roles_and_what_users_said(params: Params) -> None:
    (policy,), total = look.policies(params, limit=5)
    assert (total, policy.champion, policy.revisions, policy.newest and policy.newest.digest) == (
        1, NEW, 4, "ab" * 32,
    )  # fmt: skip
    rows, total = look.revisions(params, "sorting", limit=3)
    assert (len(rows), total) == (3, 4)
    newest_first = look.revisions(params, "sorting", limit=9)[0]
    assert newest_first[0].parent == NEW
    shown = {row.digest: look.shown_revision(row, now=3601.0) for row in newest_first}
    assert shown[NEW]["role"] == "champion"
    assert shown[NEW]["score"].startswith("90.0% [")
    assert shown[NEW]["users"] == "50.0% of 1"
    assert shown[NEW]["verdict"] == "promote"
    assert (shown[OLD]["role"], shown[THIRD]["role"]) == ("previous", "buried")
    assert shown[NEW]["age"] == "1h"
    with pytest.raises(NotFound, match="Known policies: sorting"):
        look.revisions(params, "poems", limit=9)


def test_a_task_of_ones_own_is_shown_without_its_path(params: Params) -> None:
    own = {"suite": "sorting-json", "task": "/home/ada/project/eval_suites/sorting/train.jsonl"}
    catalog = Catalog(params.paths.catalog_url)
    catalog.policies.add(replace(catalog.policies.get("sorting"), config=own))
    catalog.close()
    manifest = params.paths.revisions / "sorting" / NEW[:12] / "manifest.json"
    body = json.loads(manifest.read_text())
    body["config"]["task"] = own["task"]
    manifest.write_text(json.dumps(body))
    assert said(why(params, "sorting"))["data"].startswith("Task sorting/train.jsonl, ")
    assert look.policies(params, limit=5)[0][0].task == "sorting/train.jsonl"
    page = Path(json.loads(graftwork(params, "report", "--json").stdout)["path"]).read_text()
    assert "sorting/train.jsonl" in page
    assert "/home/ada" not in page


def test_it_says_how_old_it_is(params: Params) -> None:
    fresh = look.as_of(params)
    assert not fresh["controller"]
    assert "last snapshot" in look.note(fresh)
    catalog = Catalog(params.paths.catalog_url)
    catalog.leases.acquire("controller", "me", 60)
    catalog.close()
    assert look.note(look.as_of(params)) == ""
    params.paths.ledger_snapshot.unlink()
    assert "no ledger snapshot" in look.note(look.as_of(params))
    # The catalog alone still says what is served.
    (policy,), _ = look.policies(params, limit=5)
    assert (policy.champion, policy.champion_score) == (NEW, None)


@contextmanager
def answering(port: int, answer: Any) -> Iterator[list[str]]:
    """A server that answers every GET with this JSON; yields the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_run_links_its_version_in_mlflow(params: Params) -> None:
    registered = {"model_versions": [{"name": "sorting", "version": "4"}]}
    with answering(params.mlflow.port, registered) as asked:
        run = next(link for link in look.explain(params, "sorting").links if link.name == "run")
    assert run.facts["mlflow"]["version"] == "4"
    assert run.facts["mlflow"]["url"] == f"{params.url('mlflow')}/#/models/sorting/versions/4"
    assert NEW in asked[0]


def test_the_controllers_alarms_are_told(params: Params) -> None:
    assert look.standing(params)["alarms"] == []
    with answering(params.controller.port, {"alarms": ["ingest: the disk is full"]}):
        assert look.standing(params)["alarms"] == ["ingest: the disk is full"]


def test_without_mlflow_the_run_says_so(params: Params) -> None:
    assert "does not answer" in said(look.explain(params, "sorting"))["run"]


def graftwork(params: Params, *arguments: str) -> subprocess.CompletedProcess[str]:
    file = params.state_dir.parent / "params.yaml"
    ports = {name: {"port": free_port()} for name in ("engine", "trainer", "controller", "mlflow", "prefect")}
    file.write_text(yaml.safe_dump({"state_dir": str(params.state_dir)} | ports))
    return command_line.graftwork(*arguments, "--params", str(file))


def test_the_commands_speak_json_while_nothing_runs(params: Params) -> None:
    listed = json.loads(graftwork(params, "ls", "--json").stdout)
    assert [row["name"] for row in listed["policies"]] == ["sorting"]
    revisions = json.loads(graftwork(params, "ls", "sorting", "--limit", "2", "--json").stdout)
    assert (len(revisions["revisions"]), revisions["total"]) == (2, 4)
    chain = json.loads(graftwork(params, "why", "chat-1", "--json").stdout)
    assert [link["name"] for link in chain["links"]] == ["answer", *NAMES]
    assert not chain["as_of"]["controller"]
    status = json.loads(graftwork(params, "status", "--json").stdout)
    assert {service["state"] for service in status["services"]} == {"stopped"}
    assert status["frozen"] is False
    path = Path(json.loads(graftwork(params, "report", "--json").stdout)["path"])
    assert "sorting" in path.read_text()


def test_the_commands_speak_tables_and_sentences(params: Params) -> None:
    shown = graftwork(params, "why", f"sorting@{THIRD[:6]}")
    assert "no verdict yet" in shown.stdout
    assert "not running" in shown.stdout
    assert "90.0% [55.5, 99.7]" in graftwork(params, "ls", "sorting").stdout
    unknown = graftwork(params, "why", "poems")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (5, 1)


def test_nothing_was_ever_started_here(tmp_path: Path) -> None:
    for command in (("ls",), ("why", "x"), ("report",)):
        answer = graftwork(Params(state_dir=tmp_path / "none"), *command)
        assert answer.returncode == 5
        assert "graftwork up" in answer.stderr
