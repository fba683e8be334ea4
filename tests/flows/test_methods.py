"""Example conversations and pairs of answers, each to a scored and released revision, as people do it."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engine.catalog.opening import whole_catalog
from engine.catalog.records import Release
from tests.helpers.operated import Operated

pytestmark = [pytest.mark.heavy(minutes=4), pytest.mark.timeout(600)]
# How the base answers such a question, and how it is to.
SENTENCE = "The answer is {}."


def write_rows(path: Path, pairs: bool) -> Path:
    """Write sums that are answered by the number alone."""
    rows = list[dict[str, Any]]()
    for a in range(10, 30):
        for b in range(10, 22):
            asked, said = f"What is {a} + {b}?", str(a + b)
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            pair = {"prompt": asked, "chosen": said, "rejected": SENTENCE.format(a + b)}
            rows.append(pair if pairs else {"messages": turns})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def released(people: Operated, policy: str) -> Release:
    """Release the newest revision without a canary, and return how it ended."""
    people.run("release", policy=policy, skip_canary="The policy has no users yet.")
    with closing(whole_catalog(people.paths.catalog_url)) as catalog:
        (release,) = catalog.releases.all(policy)
    return release


def test_example_conversations_become_a_revision_that_answers_like_them(
    people: Operated, tmp_path: Path
) -> None:
    """By the forms of Prefect, with the defaults of the method; then preferences, from that revision on."""
    people.run("create_policy", name="polite", data=str(write_rows(tmp_path / "chats.jsonl", pairs=False)))
    people.run("adapt", policy="polite")
    release = released(people, "polite")
    assert release.state == "promoted"
    table = json.loads(people.artifacts("table")["revision-polite"])[0]
    before, after = (float(loss) for loss in table["held-out loss"].split(" to "))
    assert after < before / 2
    with people.client() as client:
        answer = people.ask(client, "polite", "What is 31 + 40?").json()["choices"][0]["message"]["content"]
    assert answer.isdigit()
    why = people.command("why", f"polite@{release.revision}")
    assert "loss" in why.stdout
    assert "judged by likelihood" in " ".join(why.stdout.split())
    tried = people.command("policy", "try", "polite")
    assert (tried.returncode, "no verifier of answers" in tried.stderr) == (2, True)

    pairs = write_rows(tmp_path / "pairs.jsonl", pairs=True)
    start = f"polite@{release.revision[:12]}"
    made = people.command(
        "policy", "create", "prefers", "--data", str(pairs), "--from", start, "--lr", "0.002"
    )
    assert made.returncode == 0, made.stderr
    people.run("adapt", policy="prefers")
    with closing(whole_catalog(people.paths.catalog_url)) as catalog:
        (revision,) = [one for one in catalog.revisions.page("prefers") if one.state == "exported"]
    assert revision.parent == release.revision
    people.run("report")
