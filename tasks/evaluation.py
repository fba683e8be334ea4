"""Writes, reads, compares and records evaluations: `metrics.json` (scores) and `items.jsonl` (answers).

The files contain no times and no paths, and their order is fixed: the same answers give the same bytes.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError, GraftworkError, NotFound
from engine.files import replacing
from engine.quality.estimate import interval, paired_difference
from engine.settings.params import Params
from tasks.stage_files import Files, opened_suite, read_json

if TYPE_CHECKING:
    from tasks.score import Score
    from tasks.suites import Suite

METRICS, ITEMS = "metrics.json", "items.jsonl"
BASE, REVISION = "base", "revision"
# Scores are rounded: an interval's last digits depend on the platform.
DIGITS = 6


@dataclass(frozen=True)
class Answer:
    """One model's answer to one item; `prompt` is the sha256 of the prompt's text.

    `model` is `base` or `revision`; `digest` is the revision's, empty for the base. `rule` is the version of
    the verifier's rule that gave the score.
    """

    item: str
    prompt: str
    model: str
    digest: str
    answer: str
    score: float
    rule: int = 1


@dataclass(frozen=True)
class Evaluation:
    """The content of both files; `answers` holds each model's answers in the suite's order."""

    metrics: Mapping[str, Any]
    answers: Mapping[str, Sequence[Answer]]


def write_evaluation(directory: Path, suite: "Suite", base: "Score", revision: "Score") -> None:
    """Write both files into `directory`."""
    prompts = {item.id: item.prompt_digest for item in suite.items}
    rows = [
        Answer(
            item.item,
            prompts[item.item],
            model,
            score.digest or "",
            item.answer,
            item.score,
            suite.rule_version,
        )
        for model, score in ((BASE, base), (REVISION, revision))
        for item in score.items
    ]
    lines = [json.dumps(vars(row), sort_keys=True, ensure_ascii=False) for row in rows]
    (directory / ITEMS).write_text("\n".join(lines) + "\n")
    metrics = {BASE: _metrics(base), REVISION: _metrics(revision), "difference": _difference(base, revision)}
    (directory / METRICS).write_text(json.dumps(metrics, indent=2, sort_keys=True) + "\n")


def _metrics(score: "Score") -> dict[str, float]:
    low, high = interval([item.score for item in score.items])
    values = {"score": score.mean, "ci_low": low, "ci_high": high}
    counts = {"items": len(score.items), "verifier_errors": score.verifier_errors}
    return {name: round(value, DIGITS) for name, value in values.items()} | counts


def _difference(base: "Score", revision: "Score") -> dict[str, float]:
    """Compare the revision with the base on the same items: mean, 95% interval, and counts."""
    pairs = [(new.score, old.score) for new, old in zip(revision.items, base.items, strict=True)]
    difference = paired_difference([new for new, _ in pairs], [old for _, old in pairs])
    values = {"mean": difference.mean, "ci_low": difference.low, "ci_high": difference.high}
    counts = {
        "better": sum(new > old for new, old in pairs),
        "equal": sum(new == old for new, old in pairs),
        "worse": sum(new < old for new, old in pairs),
    }
    return {name: round(value, DIGITS) for name, value in values.items()} | counts


def read_evaluation(directory: Path) -> Evaluation:
    """Read both files; raises `NotFound` when one is missing, `ConfigError` when they disagree."""
    for name in (METRICS, ITEMS):
        if not (directory / name).is_file():
            raise NotFound(f"There is no {name} in {directory}. Run `dvc repro` there first.")
    answers: dict[str, list[Answer]] = {BASE: [], REVISION: []}
    try:
        metrics = json.loads((directory / METRICS).read_text())
        for line in (directory / ITEMS).read_text().split("\n")[:-1]:
            row = Answer(**json.loads(line))
            answers[row.model].append(row)
        for model, rows in answers.items():
            mean = round(fmean(row.score for row in rows), DIGITS)
            assert (metrics[model]["items"], metrics[model]["score"]) == (len(rows), mean)
    except (ValueError, TypeError, KeyError, AssertionError) as error:
        raise ConfigError(
            f"{METRICS} and {ITEMS} in {directory} do not match ({error!r}). Run `dvc repro` there."
        ) from None
    return Evaluation(metrics, answers)


def compare(ours: Evaluation, other: Evaluation, tolerance: float) -> list[dict[str, Any]]:
    """Return a row for each model: both scores, their difference, and the share of equal answers.

    Raises `ConfigError` when the items or the rules differ, `GraftworkError` when a mean differs by more
    than `tolerance`.
    """
    rows = []
    for model in (BASE, REVISION):
        mine, theirs = ours.answers[model], other.answers[model]
        if [row.prompt for row in mine] != [row.prompt for row in theirs]:
            raise ConfigError(
                "The two evaluations have different items. Compare evaluations of one suite version."
            )
        if {row.rule for row in mine} != {row.rule for row in theirs}:
            raise ConfigError(
                "The two evaluations were judged by two versions of the verifier's rule. Run `dvc repro` in "
                "both with one version of Graftwork."
            )
        scores = (ours.metrics[model]["score"], other.metrics[model]["score"])
        equal = sum(a.answer == b.answer for a, b in zip(mine, theirs, strict=True))
        rows.append({
            "model": model,
            "here": scores[0],
            "there": scores[1],
            "apart": round(abs(scores[0] - scores[1]), DIGITS),
            "equal answers": f"{equal} of {len(mine)}",
            "same revision": mine[0].digest == theirs[0].digest,
        })  # fmt: skip
    far = [row for row in rows if row["apart"] > tolerance]
    if far:
        raise GraftworkError(
            " ".join(
                f"The score of the {row['model']} is {row['here']} here and {row['there']} there: "
                f"{row['apart']} apart, over the tolerance of {tolerance}."
                for row in far
            )
        )
    return rows


def record(params: Params, directory: Path, evaluation: Evaluation) -> int:
    """Emit an evaluation to the ledger through the spool; return the number of rows.

    Idempotent: a row's id derives from its content, as with `graftwork score`. Raises `ConfigError` when the
    files do not match the stages' suite and revision.
    """
    from engine.adapters.revision import read_manifest
    from tasks.score import ItemScore, emit_estimates, emit_scores, on_base

    files = Files(directory)
    manifest = read_manifest(files.revision)
    text = read_json(files.base / "base.json", "base").get("text_digest")
    suite = on_base(params, opened_suite(files), manifest.base_digest, text)
    prompts = [item.prompt_digest for item in suite.items]
    for rows, digest in ((evaluation.answers[BASE], ""), (evaluation.answers[REVISION], manifest.digest)):
        if [row.prompt for row in rows] != prompts or {row.digest for row in rows} != {digest}:
            raise ConfigError(
                f"{directory / ITEMS} does not match the revision and the suite beside it. Run `dvc repro`."
            )
        if {row.rule for row in rows} != {suite.rule_version}:
            raise ConfigError(
                f"{directory / ITEMS} was judged by another version of the verifier's rule than "
                f"{suite.rule_version}, which this code has. Run `dvc repro`."
            )
        items = tuple(ItemScore(row.item, row.score, row.answer) for row in rows)
        of = (params, manifest.base_digest, manifest.policy, digest or None, suite, items)
        emit_scores(*of)
        emit_estimates(*of)
    return 2 * len(prompts)


def pin_revision(file: Path, policy: str, digest: str | None) -> str:
    """Set the revision that `dvc repro` evaluates in a settings file, keeping its comments.

    Raises `NotFound` when `digest` is None, that is, when the policy has no champion.
    """
    from ruamel.yaml import YAML

    if digest is None:
        raise NotFound(f"The policy {policy!r} has no champion yet. Release one of its revisions first.")
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.indent(mapping=2, sequence=4, offset=2)
    settings = yaml.load(file.read_text())
    settings.setdefault("evaluate", {}).update({"policy": policy, "revision": digest})
    with replacing(file) as draft, draft.open("w") as output:
        yaml.dump(settings, output)
    return digest


def write_report(directory: Path, target: Path, suite: "Suite") -> None:
    """Write `report.html` and the data of plots to `target`, from the two files and the suite's segments."""
    from jinja2 import Environment

    evaluation = read_evaluation(directory)
    pairs = list(zip(evaluation.answers[BASE], evaluation.answers[REVISION], strict=True))
    target.mkdir(parents=True, exist_ok=True)
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        (Path(__file__).parent / "evaluation.html").read_text()
    )
    (target / "report.html").write_text(page.render(metrics=evaluation.metrics, pairs=pairs))
    models = [{"model": model, "score": evaluation.metrics[model]["score"]} for model in (BASE, REVISION)]
    _write_csv(target / "scores.csv", models)
    outcomes = [{"item": old.item, BASE: _grade(old), REVISION: _grade(new)} for old, new in pairs]
    _write_csv(target / "outcomes.csv", outcomes)
    segments = {item.id: item.segment for item in suite.items}
    _write_csv(target / "segments.csv", _segment_rows(evaluation, segments))


def _segment_rows(evaluation: Evaluation, segments: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return each model's score on each segment; items without one are `none`."""
    named = {item: segment or "none" for item, segment in segments.items()}
    scores: dict[tuple[str, str], list[float]] = {}
    for model, answers in evaluation.answers.items():
        for answer in answers:
            scores.setdefault((named[answer.item], model), []).append(answer.score)
    return [
        {"of": f"{segment}, {model}", "score": round(fmean(values), DIGITS), "items": len(values)}
        for (segment, model), values in sorted(scores.items())
    ]


def _grade(answer: Answer) -> str:
    return "right" if answer.score == 1 else "wrong" if answer.score == 0 else "partly right"


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
