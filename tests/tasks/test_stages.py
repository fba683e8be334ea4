"""The stages of `dvc repro` on files: what they take and refuse, and that an evaluation repeats its bytes."""

import csv
import json
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from engine.adapters import revision
from engine.base.families import BaseShapes
from engine.base.prompts import prompt_text
from engine.base.resident import base_digest
from engine.catalog.catalog import Policy
from engine.catalog.opening import whole_catalog
from engine.errors import AdapterError, BaseModelError, ConfigError, Conflict, GraftworkError, NotFound
from engine.ledger.ledger import Ledger, open_snapshot
from engine.problems.procedural import stream
from engine.problems.verifiers import RULES
from engine.publishing.importing import directory_from_store, import_revision
from engine.security.credentials import logins
from engine.services import lifecycle as services
from engine.settings.params import Params, Paths, load_params
from tasks import evaluation, stage_evaluate, stage_files, stages
from tasks.policies import create_policy
from tasks.register import register
from tasks.score import ItemScore, Score
from tasks.stage_files import Files
from tasks.suites import build_suite, load_suite
from tests.helpers import command_line
from tests.helpers.history import step_row
from tests.helpers.live import free_port
from tests.helpers.repository import ROOT

TARGETS = ("down_proj", "q_proj")


def silent(name: str, state: str) -> None:
    pass


def make_revision(base: Path, directory: Path, seed: int = 0, rank: int = 2, scale: float = 0.05, **changes):
    """Write a revision of random values that fits the base."""
    shapes = BaseShapes.read(base).modules()
    generator = torch.Generator().manual_seed(seed)
    dtype = changes.pop("dtype", torch.float32)
    tensors = {}
    for name, (inputs, outputs) in shapes.items():
        if name.endswith(TARGETS):
            for side, size in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = scale * torch.randn(size, generator=generator)
                tensors[f"{name}.lora_{side}"] = values.to(dtype)
    settings = {"policy": "sums", "base_digest": base_digest(base), "step": 3, **changes}
    manifest = revision.make_manifest(tensors, rank=rank, targets=TARGETS, **settings)
    revision.write_revision(directory, tensors, manifest, {})
    return manifest


@dataclass(frozen=True)
class Checkout:
    """A small checkout: settings, one suite, and room for what the stages write."""

    file: Path
    files: Files

    def params(self) -> Params:
        return load_params(self.file)

    def set(self, **changes) -> None:
        data = yaml.safe_load(self.file.read_text())
        self.file.write_text(yaml.safe_dump(data | changes))


@pytest.fixture
def checkout(tiny_base: Path, tmp_path: Path) -> Checkout:
    root = tmp_path / "checkout"
    root.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    suites = root / "eval_suites"
    build_suite("sums", "addition", "terse", lambda text: prompt_text(tokenizer, text), count=24, root=suites)
    settings = {
        "base": {"name": str(tiny_base)},
        "policies": {"sums": {"task": "addition", "suite": "sums"}},
        "evaluate": {"policy": "sums", "revision": "adapt"},
    }
    (root / "params.yaml").write_text(yaml.safe_dump(settings))
    return Checkout(root / "params.yaml", Files(root))


def build(checkout: Checkout) -> None:
    stages.build_base(checkout.params(), lambda step, steps, loss: None)
    stages.prepare_suites(checkout.params())


def adapted(checkout: Checkout, directory: Path) -> str:
    """Stand in for stage adapt: put a revision where it would."""
    shutil.rmtree(checkout.files.adapt, ignore_errors=True)
    shutil.copytree(directory, checkout.files.adapt / "revision")
    digest = revision.read_manifest(directory).digest
    (checkout.files.adapt / "adapt.json").write_text(json.dumps({"digest": digest}))
    return digest


# Importing


def test_an_import_is_published_once_and_holds_the_same_tensors(tiny_base, tmp_path):
    params = Params(state_dir=tmp_path / "state", base={"name": str(tiny_base)})
    manifest = make_revision(tiny_base, tmp_path / "revision")
    assert import_revision(params, tmp_path / "revision") == manifest
    assert import_revision(params, tmp_path / "revision") == manifest
    catalog = whole_catalog(params.paths.catalog_url)
    (row,) = catalog.revisions.page("sums")
    assert (row.digest, row.state, row.rank) == (manifest.digest, "exported", 2)
    assert len(list(params.paths.store.glob("*.seg"))) == 1
    catalog.close()
    found = directory_from_store(params, "sums", manifest.digest, tmp_path / "again")
    tensors, again = revision.read_revision(found, manifest.base_digest)
    assert again.digest == manifest.digest
    expected, _ = revision.read_revision(tmp_path / "revision")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], expected[key]) for key in expected)


def test_an_import_leaves_the_policy_its_settings_and_its_owner(tiny_base, tmp_path):
    params = Params(state_dir=tmp_path / "state", base={"name": str(tiny_base)})
    manifest = make_revision(tiny_base, tmp_path / "one")
    import_revision(params, tmp_path / "one")
    catalog = whole_catalog(params.paths.catalog_url)
    catalog.policies.add(Policy("sums", manifest.base_digest, {"suite": "mine"}, "local", 1.0))
    make_revision(tiny_base, tmp_path / "two", seed=1)
    import_revision(params, tmp_path / "two")
    assert catalog.policies.get("sums").config == {"suite": "mine"}
    make_revision(tiny_base, tmp_path / "three", seed=2)
    with pytest.raises(Conflict, match="belongs to 'local'"):
        import_revision(params, tmp_path / "three", owner="eve")
    assert len(catalog.revisions.page("sums")) == 2
    catalog.close()


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"rank": 16}, AdapterError, r"rank 16.*`engine\.max_rank`"),
        ({"dtype": torch.bfloat16}, AdapterError, "bfloat16.*float32"),
        ({"base_digest": "c" * 64}, BaseModelError, "base cccccccccccc"),
        ({"policy": "../up"}, AdapterError, "policy name"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_published(tiny_base, tmp_path, changes, error, said):
    params = Params(state_dir=tmp_path / "state", base={"name": str(tiny_base)})
    make_revision(tiny_base, tmp_path / "revision", **changes)
    with pytest.raises(error, match=said):
        import_revision(params, tmp_path / "revision")
    assert not params.paths.store.exists()
    assert not params.paths.revisions.exists()


def test_one_altered_byte_is_noticed(tiny_base, tmp_path):
    make_revision(tiny_base, tmp_path / "revision")
    file = tmp_path / "revision" / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(AdapterError, match="have the digest"):
        import_revision(Params(state_dir=tmp_path, base={"name": str(tiny_base)}), tmp_path / "revision")


# The stages before evaluate


def test_suites_writes_what_was_resolved_and_nothing_that_moves(checkout):
    build(checkout)
    files = checkout.files
    known = json.loads((files.policy / "policy.json").read_text())
    assert (known["policy"], known["config"]["task"], known["config"]["lr"]) == ("sums", "addition", 2e-3)
    assert stage_files.opened_suite(files).digest == load_suite("sums", files.root / "eval_suites").digest
    before = {path: path.read_bytes() for path in (files.root / "repro").rglob("*.json")}
    # Neither ports nor where state lies decide anything.
    checkout.set(engine={"port": 9000}, trainer={"port": 9001}, state_dir="elsewhere")
    build(checkout)
    assert {path: path.read_bytes() for path in before} == before
    checkout.set(engine={"slots": 4})
    build(checkout)
    assert (files.engine).read_bytes() != before[files.engine]


def test_suites_refuses_prompts_that_the_policy_does_not_ask(checkout):
    stages.build_base(checkout.params(), lambda step, steps, loss: None)
    checkout.set(policies={"sums": {"task": "addition", "suite": "sums", "system": "Be terse."}})
    with pytest.raises(ConfigError, match=r"Item 0000.*sums"):
        stages.prepare_suites(checkout.params())


def test_suites_refuses_a_base_that_has_changed_since(checkout, tiny_base, tmp_path):
    stages.build_base(checkout.params(), lambda step, steps, loss: None)
    moved = tmp_path / tiny_base.name
    shutil.copytree(tiny_base, moved)
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"changed": True}))
    checkout.set(base={"name": str(moved)})
    with pytest.raises(BaseModelError, match="stage `base`"):
        stages.prepare_suites(checkout.params())


def test_a_persons_data_is_named_by_content_not_by_place(checkout, tmp_path):
    own = checkout.files.root / "eval_suites" / "mine"
    shutil.copytree(checkout.files.root / "eval_suites" / "sums", own)
    (own / "sums.yaml").rename(own / "mine.yaml")
    (own / "train.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    (own / "policy.yaml").write_text(
        yaml.safe_dump({"task": "train.jsonl", "suite": "mine", "verifier": "exact"})
    )
    checkout.set(evaluate={"policy": "mine", "revision": "adapt"})
    build(checkout)
    config = json.loads((checkout.files.policy / "policy.json").read_text())["config"]
    assert config["task"] == "repro/policy/train.jsonl"
    assert len(config["data_digest"]) == 64
    assert (checkout.files.policy / "train.jsonl").read_bytes() == (own / "train.jsonl").read_bytes()
    assert str(checkout.files.root) not in (checkout.files.policy / "policy.json").read_text()


def test_chats_are_prepared_as_their_messages(checkout, tmp_path):
    turns = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "2?"}]
    rows = [
        {"messages": [*turns, {"role": "assistant", "content": "2"}, {"role": "user", "content": f"{n}?"}],
         "answer": str(n)}
        for n in range(200)
    ]  # fmt: skip
    (tmp_path / "d.json").write_text(json.dumps(rows))
    create_policy(checkout.params(), "mine", tmp_path / "d.json", "exact", items=12)
    checkout.set(evaluate={"policy": "mine", "revision": "adapt"})
    build(checkout)
    for which in ("train", "eval"):
        _, problem = next(stream(str(checkout.files.policy / "train.jsonl"), which, 1))
        assert problem.messages[:2] == tuple(turns)
        assert problem.messages[-1]["content"] == f"{problem.answer}?"


def test_a_pinned_digest_trains_nothing(checkout):
    build(checkout)
    checkout.set(evaluate={"policy": "sums", "revision": "a" * 64})
    said = []
    stages.adapt(checkout.params(), lambda *words: said.append(words), pytest.fail)
    assert json.loads((checkout.files.adapt / "adapt.json").read_text())["digest"] is None
    assert said == [("adapt", stages.PINNED)]


def test_the_learning_curve_is_each_steps_row_without_its_seconds(tmp_path):
    curve = [step_row(1), step_row(2, kl=None)]
    files = Files(tmp_path)
    stages.write_adapted(files, {"digest": None}, curve)
    with (files.adapt / "curve.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    for row, step in zip(rows, curve, strict=True):
        assert row == {name: "" if step[name] is None else str(step[name]) for name in row}
    assert {"reward", "reward_std", "entropy"} < set(rows[0])
    assert not [name for name in rows[0] if name.endswith("_s")]


def test_revision_is_found_in_the_state_directory_or_in_the_store(checkout, tiny_base, tmp_path):
    build(checkout)
    manifest = make_revision(tiny_base, tmp_path / "revision")
    checkout.set(evaluate={"policy": "sums", "revision": manifest.digest})
    params = checkout.params()
    with pytest.raises(NotFound, match=f"no revision {manifest.digest[:12]}"):
        stages.take_revision(params)
    import_revision(params, tmp_path / "revision")
    stages.take_revision(params)
    assert revision.read_manifest(checkout.files.revision) == replace(manifest, created_at=0.0)
    kept = params.paths.revisions / "sums" / manifest.digest[:12]
    assert not kept.exists()
    shutil.copytree(tmp_path / "revision", kept)
    stages.take_revision(params)
    assert revision.read_revision(checkout.files.revision)[1].digest == manifest.digest
    assert list(checkout.files.services.iterdir()) == []


@pytest.mark.slow
def test_revision_comes_from_mlflows_registry_while_its_server_runs(
    checkout, tiny_base, tmp_path, monkeypatch
):
    build(checkout)
    manifest = make_revision(tiny_base, tmp_path / "revision")
    evaluate = {"policy": "sums", "revision": manifest.digest}
    checkout.set(mlflow={"port": free_port()}, evaluate=evaluate)
    params = checkout.params()
    with services.session(params, lambda: None, silent, only=("mlflow",)):
        for name, value in logins(params.paths).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(NotFound, match=r"no revision.*MLflow"):
            stages.take_revision(params)
        register(params, "sums", tmp_path / "revision")
        stages.take_revision(params)
    tensors, found = revision.read_revision(checkout.files.revision)
    assert (found.digest, found.policy) == (manifest.digest, "sums")
    assert len(tensors) == manifest.tensor_count


def test_an_experiments_copy_finds_the_revisions_of_its_checkout(checkout, tiny_base, tmp_path):
    build(checkout)
    manifest = make_revision(tiny_base, tmp_path / "revision")
    import_revision(checkout.params(), tmp_path / "revision")
    copy = checkout.files.root / ".dvc" / "tmp" / "exps" / "standalone" / "one"
    shutil.copytree(checkout.files.root, copy, ignore=shutil.ignore_patterns(".graftwork", ".dvc"))
    inside = Checkout(copy / "params.yaml", Files(copy))
    inside.set(evaluate={"policy": "sums", "revision": manifest.digest})
    stages.take_revision(inside.params())
    assert revision.read_manifest(copy / "repro" / "revision").digest == manifest.digest
    assert not (copy / ".graftwork").exists()


def test_revision_refuses_another_policys_and_another_bases(checkout, tiny_base, tmp_path):
    build(checkout)
    make_revision(tiny_base, tmp_path / "other", policy="others")
    adapted(checkout, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"others@.*sums@"):
        stages.take_revision(checkout.params())
    make_revision(tiny_base, tmp_path / "foreign", base_digest="c" * 64)
    adapted(checkout, tmp_path / "foreign")
    with pytest.raises(BaseModelError, match="base cccccccccccc"):
        stages.take_revision(checkout.params())


def test_the_same_tensors_give_the_same_files_whenever_they_were_exported(checkout, tiny_base, tmp_path):
    build(checkout)
    written = []
    for name in ("first", "second"):
        make_revision(tiny_base, tmp_path / name)
        adapted(checkout, tmp_path / name)
        stages.take_revision(checkout.params())
        written.append({path.name: path.read_bytes() for path in checkout.files.revision.iterdir()})
    assert written[0] == written[1]


def graftwork(file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return command_line.graftwork(*arguments, "--params", str(file))


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"evaluate": {"policy": "ghost"}}, 2, "no policy 'ghost'"),
        ({"evaluate": {"policy": "sums", "revision": "abc"}}, 2, "`evaluate.revision`"),
        ({"base": {"name": "/nowhere"}}, 3, "/nowhere"),
    ],
)
def test_a_stage_that_cannot_run_says_one_sentence(checkout, changes, code, said):
    checkout.set(**changes)
    ended = command_line.stage("base", "--params", str(checkout.file))
    assert ended.returncode == code, ended.stderr
    assert said in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_a_stage_without_the_one_before_it_says_which(checkout):
    ended = command_line.stage("suites", "--params", str(checkout.file))
    assert ended.returncode == 5
    assert "stage `base`" in ended.stderr


# The two files of an evaluation


def scored(suite, digest, values) -> Score:
    items = [
        ItemScore(item.id, value, f"<{value}>\n\u2028")
        for item, value in zip(suite.items, values, strict=True)
    ]
    return Score(
        "sums", digest, "b" * 64, suite.name, suite.version, sum(values) / len(values), 0, 0, tuple(items),
        False, 1.5, 1,
    )  # fmt: skip


@pytest.fixture
def suite(tmp_path):
    return build_suite("sums", "addition", "terse", "<{}>".format, count=10, root=tmp_path / "suites")


def test_metrics_hold_scores_and_counts_in_fixed_order(suite, tmp_path):
    base, tuned = (
        scored(suite, None, [1.0] * 2 + [0.0] * 8),
        scored(suite, "d" * 64, [0.0] + [1.0] * 8 + [0.5]),
    )
    evaluation.write_evaluation(tmp_path, suite, base, tuned)
    text = (tmp_path / "metrics.json").read_text()
    metrics = json.loads(text)
    assert list(metrics) == ["base", "difference", "revision"]
    assert text == json.dumps(metrics, indent=2, sort_keys=True) + "\n"
    assert (metrics["base"]["score"], metrics["revision"]["score"]) == (0.2, 0.85)
    # Clopper and Pearson's interval for 2 of 10.
    assert (metrics["base"]["ci_low"], metrics["base"]["ci_high"]) == (0.025211, 0.556095)
    assert {name: metrics["difference"][name] for name in ("better", "equal", "worse", "mean")} == {
        "better": 8, "equal": 1, "worse": 1, "mean": 0.65,
    }  # fmt: skip
    assert all(isinstance(value, int | float) for part in metrics.values() for value in part.values())
    lines = (tmp_path / "items.jsonl").read_text().split("\n")[:-1]
    assert len(lines) == 20
    first = json.loads(lines[10])
    assert first == {
        "answer": "<0.0>\n\u2028", "digest": "d" * 64, "item": "0000", "model": "revision",
        "prompt": suite.items[0].prompt_digest, "rule": 1, "score": 0.0,
    }  # fmt: skip


def evaluated(directory: Path, suite, values, digest="d" * 64) -> evaluation.Evaluation:
    directory.mkdir(exist_ok=True)
    evaluation.write_evaluation(
        directory, suite, scored(suite, None, [0.0] * 10), scored(suite, digest, values)
    )
    return evaluation.read_evaluation(directory)


def test_compare_allows_the_tolerance_and_not_more(suite, tmp_path):
    ours = evaluated(tmp_path / "here", suite, [1.0] * 5 + [0.0] * 5)
    other = evaluated(tmp_path / "there", suite, [1.0] * 6 + [0.0] * 4)
    rows = evaluation.compare(ours, other, 0.1)
    assert [row["apart"] for row in rows] == [0.0, 0.1]
    assert rows[1]["equal answers"] == "9 of 10"
    with pytest.raises(GraftworkError, match=r"0\.1 apart.*0\.09"):
        evaluation.compare(ours, other, 0.09)


def test_compare_refuses_other_items(suite, tmp_path):
    ours = evaluated(tmp_path / "here", suite, [1.0] * 10)
    others = build_suite("sums", "addition", "terse", "[{}]".format, count=10, root=tmp_path / "other-suites")
    with pytest.raises(ConfigError, match="different items"):
        evaluation.compare(ours, evaluated(tmp_path / "there", others, [1.0] * 10), 1.0)


def test_scores_by_two_versions_of_a_rule_are_never_compared(suite, tmp_path, monkeypatch):
    old = evaluated(tmp_path / "here", suite, [1.0] * 10)
    monkeypatch.setitem(RULES, "numeric", 2)
    newer = replace(suite, rule={"verifier": "numeric"})
    new = evaluated(tmp_path / "there", newer, [1.0] * 10)
    with pytest.raises(ConfigError, match="two versions of the verifier's rule"):
        evaluation.compare(old, new, 1.0)
    assert evaluation.compare(new, new, 1.0)
    # Files of before name no rule: it was the first version.
    items = tmp_path / "here" / "items.jsonl"
    items.write_text(items.read_text().replace('"rule": 1, ', ""))
    assert evaluation.compare(old, evaluation.read_evaluation(tmp_path / "here"), 0.0)


def test_files_that_are_no_evaluation_are_refused(suite, tmp_path):
    with pytest.raises(NotFound, match=r"no metrics\.json in"):
        evaluation.read_evaluation(tmp_path)
    evaluated(tmp_path, suite, [1.0] * 10)
    text = (tmp_path / "metrics.json").read_text()
    (tmp_path / "metrics.json").write_text(text.replace('"score": 1.0', '"score": 0.9'))
    with pytest.raises(ConfigError, match="do not match"):
        evaluation.read_evaluation(tmp_path)
    (tmp_path / "metrics.json").write_text(text)
    lines = (tmp_path / "items.jsonl").read_text().split("\n")
    (tmp_path / "items.jsonl").write_text("\n".join(lines[1:]))
    with pytest.raises(ConfigError, match="do not match"):
        evaluation.read_evaluation(tmp_path)
    (tmp_path / "items.jsonl").write_text("{")
    with pytest.raises(ConfigError, match="do not match"):
        evaluation.read_evaluation(tmp_path)


def test_the_report_is_made_of_the_two_files_and_shows_answers_as_text(suite, tmp_path):
    evaluated(tmp_path / "here", suite, [1.0] * 9 + [0.0])
    suite = replace(
        suite, items=tuple(replace(it, segment="" if it.id < "0004" else "long") for it in suite.items)
    )
    evaluation.write_report(tmp_path / "here", tmp_path / "report", suite)
    page = (tmp_path / "report" / "report.html").read_text()
    assert "&lt;1.0&gt;" in page
    assert "<1.0>" not in page
    assert page.count('class="better"') == 9
    assert "http" not in page
    outcomes = (tmp_path / "report" / "outcomes.csv").read_text().splitlines()
    assert outcomes[:2] == ["item,base,revision", "0000,wrong,right"]
    assert (tmp_path / "report" / "scores.csv").read_text() == "model,score\nbase,0.0\nrevision,0.9\n"
    segments = (tmp_path / "report" / "segments.csv").read_text().splitlines()
    assert list(csv.DictReader(segments)) == [
        {"of": "long, base", "score": "0.0", "items": "6"},
        {"of": "long, revision", "score": "0.833333", "items": "6"},
        {"of": "none, base", "score": "0.0", "items": "4"},
        {"of": "none, revision", "score": "1.0", "items": "4"},
    ]


def test_recording_twice_is_once_and_only_for_what_lies_beside_it(checkout, tiny_base, tmp_path):
    build(checkout)
    make_revision(tiny_base, tmp_path / "revision")
    digest = adapted(checkout, tmp_path / "revision")
    stages.take_revision(checkout.params())
    suite, root = stage_files.opened_suite(checkout.files), checkout.files.root
    base, tuned = scored(suite, None, [0.0] * 24), scored(suite, digest, [1.0] * 24)
    evaluation.write_evaluation(root, suite, base, tuned)
    params = checkout.params()
    for _ in range(2):
        assert evaluation.record(params, root, evaluation.read_evaluation(root)) == 48
    ledger = Ledger(params.paths.ledger)
    # The scores, and of base and revision an estimate for each target.
    assert ledger.ingest(params.paths.spool) == 48 + 4
    ledger.snapshot(params.paths.ledger_snapshot)
    ledger.close()
    with open_snapshot(params.paths.ledger_snapshot) as snapshot:
        rows = snapshot.execute(
            "SELECT policy, digest, count(*), sum(score) FROM scores GROUP BY ALL"
        ).fetchall()
    assert sorted(rows, key=str) == [("sums", digest, 24, 24.0), (None, None, 24, 0.0)]
    evaluation.write_evaluation(root, suite, base, scored(suite, "e" * 64, [1.0] * 24))
    with pytest.raises(ConfigError, match="suite beside it"):
        evaluation.record(params, root, evaluation.read_evaluation(root))
    evaluation.write_evaluation(root, replace(suite, rule={"verifier": "numeric"}), base, tuned)
    with pytest.raises(ConfigError, match="another version of the verifier's rule"):
        evaluation.record(params, root, evaluation.read_evaluation(root))


def test_pin_writes_the_digest_and_keeps_the_comments(tmp_path):
    file = tmp_path / "params.yaml"
    file.write_text((ROOT / "params.yaml").read_text())
    evaluation.pin_revision(file, "sorting", "d" * 64)
    params = load_params(file)
    assert (params.evaluate.policy, params.evaluate.revision) == ("sorting", "d" * 64)
    expected = (ROOT / "params.yaml").read_text()
    expected = expected.replace("policy: arithmetic", "policy: sorting").replace(
        "revision: adapt", f"revision: {'d' * 64}"
    )
    assert file.read_text() == expected
    with pytest.raises(NotFound, match="no champion yet"):
        evaluation.pin_revision(file, "sorting", None)


def test_pin_adds_the_section_where_it_is_missing(tmp_path):
    file = tmp_path / "params.yaml"
    file.write_text("policies:\n  sums: {task: addition, suite: sums} # mine\n")
    evaluation.pin_revision(file, "sums", "d" * 64)
    assert load_params(file).evaluate.revision == "d" * 64
    assert "# mine" in file.read_text()


def test_the_commands_compare_with_the_stated_tolerance(suite, tmp_path):
    file = tmp_path / "here" / "params.yaml"
    evaluated(tmp_path / "here", suite, [1.0] * 5 + [0.0] * 5)
    evaluated(tmp_path / "there", suite, [1.0] * 6 + [0.0] * 4)
    file.write_text("{}\n")
    ended = graftwork(file, "repro", "--compare", str(tmp_path / "there"))
    assert ended.returncode == 1
    assert ended.stderr.strip() == (
        "The score of the revision is 0.5 here and 0.6 there: 0.1 apart, over the tolerance of 0.02."
    )
    ended = graftwork(file, "repro", "--compare", str(tmp_path / "there"), "--tolerance", "0.1")
    assert ended.returncode == 0, ended.stderr
    assert "tolerance of 0.1" in ended.stdout
    ended = graftwork(file, "repro")
    assert (ended.returncode, len(ended.stderr.strip().splitlines())) == (2, 1)


def test_the_command_pins_the_champion(checkout, tiny_base, tmp_path):
    manifest = make_revision(tiny_base, tmp_path / "revision")
    import_revision(checkout.params(), tmp_path / "revision")
    ended = graftwork(checkout.file, "repro", "--pin", "sums")
    assert (ended.returncode, ended.stderr.count("no champion yet")) == (5, 1)
    catalog = whole_catalog(checkout.params().paths.catalog_url)
    catalog.routes.update(replace(catalog.routes.get("sums"), champion=manifest.digest), 0)
    catalog.close()
    ended = graftwork(checkout.file, "repro", "--pin", "sums")
    assert ended.returncode == 0, ended.stderr
    assert checkout.params().evaluate.revision == manifest.digest


# The real engine


@pytest.mark.slow
def test_an_evaluation_on_the_real_engine_repeats_its_bytes_in_any_batch(checkout, tiny_base, tmp_path):
    build(checkout)
    make_revision(tiny_base, tmp_path / "revision")
    adapted(checkout, tmp_path / "revision")
    stages.take_revision(checkout.params())
    written = []
    for batch in (1, 16):
        checkout.set(evaluate={"policy": "sums", "revision": "adapt", "batch": batch})
        stage_evaluate.evaluate(checkout.params(), silent)
        written.append(
            [(checkout.files.root / name).read_bytes() for name in ("metrics.json", "items.jsonl")]
        )
    assert written[0] == written[1]
    found = evaluation.read_evaluation(checkout.files.root)
    answers = [[row.answer for row in found.answers[model]] for model in ("base", "revision")]
    # Not the same bytes because nothing was answered, or because the revision was not applied.
    assert all(any(texts) for texts in answers)
    assert answers[0] != answers[1]
    assert list(checkout.files.services.iterdir()) == []
    assert not Paths(checkout.files.root / ".graftwork").spool.exists()
