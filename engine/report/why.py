"""Explains an answer by a chain: answer, revision, verdict, scores, run, data and commit.

Read from the ledger's snapshot, the catalog and the revision's manifest, without any service. A link with
nothing known says why.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import duckdb

from engine.adapters.manifests import stored_manifest
from engine.catalog.catalog import Catalog, Revision
from engine.catalog.opening import open_catalog
from engine.catalog.records import served_name, split_served_name
from engine.errors import Conflict, NotFound
from engine.ledger.ledger import open_ledger
from engine.ledger.queries import named_rows, newest_items
from engine.quality.estimate import paired_difference
from engine.quality.term_sequence import MeanInterval
from engine.report.data import HAS_CURVE, Curve, SuiteScore
from engine.report.flipped_items import flipped_items
from engine.report.links import Link
from engine.report.overview import contract_of, mean_score, role_of, suite_score, task_of
from engine.report.training import spoken
from engine.settings.params import DIGEST12, Params
from engine.training.service.train_step import TrainStep

ANSWER = """
    SELECT id, "at", policy, digest, arm, unit, purpose, status, latency_s, prompt_tokens, completion_tokens,
        route_version, gateway,
        (SELECT any_value(reward) FROM rated WHERE rated.id = observations.id) AS reward
    FROM observations WHERE id = ?
"""
ROUTED = """
    SELECT "at", "by", reason FROM route_changes WHERE policy = ? AND version = ? ORDER BY "at" LIMIT 1
"""
STEP = "SELECT session, step FROM train_steps WHERE policy = ? AND digest = ? LIMIT 1"
SUITE = """
    SELECT suite, arg_max(suite_version, "at") FROM scores WHERE policy = ? AND digest = ? GROUP BY suite
"""
VERDICTS = """
    SELECT "at", verdict, "by", reason FROM verdicts
    WHERE policy = ? AND digest = ? ORDER BY "at" DESC LIMIT 20
"""
# `SELECT *`: a snapshot written by an older version has fewer columns.
TRAINED = f"""
    SELECT * FROM train_steps
    WHERE policy = ? AND session = ? AND step <= ? AND {HAS_CURVE} ORDER BY step
"""
DIGITS = 6
NOT_BASE = "The base is not trained here."


@dataclass(frozen=True)
class VerdictRow:
    """One verdict; `at` is epoch seconds."""

    at: float
    verdict: str
    by: str
    reason: str


@dataclass(frozen=True)
class VersionFacts:
    """What a revision's page shows; `steps` are those of the training that produced it, in order."""

    policy: str
    digest: str
    parent: str | None
    champion: str | None
    suite: str
    bytes: int
    probe: dict[str, Any]
    children: tuple[str, ...] = ()
    score: SuiteScore | None = None
    parent_score: SuiteScore | None = None
    champion_score: SuiteScore | None = None
    base_score: SuiteScore | None = None
    against_champion: MeanInterval | None = None
    verdicts: tuple[VerdictRow, ...] = ()
    steps: tuple[TrainStep, ...] = ()

    @property
    def rewards(self) -> tuple[float, ...]:
        """Return the mean reward of each step."""
        return tuple(step.reward for step in self.steps if step.reward is not None)

    @property
    def tokens(self) -> int:
        """Return the number of trained tokens."""
        return sum(step.tokens or 0 for step in self.steps)

    @property
    def seconds(self) -> dict[str, float]:
        """Return the steps' seconds by phase."""
        spent: Counter[str] = Counter()
        for step in self.steps:
            spent.update(step.phases)
        return dict(spent)


@dataclass(frozen=True)
class Chain:
    """The links from an answer or a revision back to the commit. A digest of None is the base."""

    subject: str
    policy: str | None
    digest: str | None
    links: tuple[Link, ...]


def gather(params: Params, policy: str, digest: str) -> VersionFacts:
    """Return the facts about a revision; raises `NotFound` for an unknown one."""
    with open_catalog(params.paths) as catalog, open_ledger(params.paths.ledger_snapshot) as ledger:
        revision = catalog.revisions.get(policy, digest)
        fixed: dict[str, Any] = {
            "policy": policy, "digest": revision.digest, "parent": revision.parent,
            "champion": catalog.routes.get(policy).champion, "bytes": revision.bytes,
            "suite": str(catalog.policies.get(policy).config.get("suite", "")),
            "probe": revision.probe or {},
            "children": tuple(it.digest for it in catalog.listing.children(policy, revision.digest)),
        }  # fmt: skip
        manifest = stored_manifest(params.paths.revision(policy, revision.digest))
        session = manifest.get("config", {}).get("session")
        steps = named_rows(ledger.execute(TRAINED, [policy, session, revision.step]))
        measured = _measured(ledger, revision.base, fixed)
        return VersionFacts(**fixed, **measured, steps=tuple(map(TrainStep.of, steps)))


def _measured(ledger: duckdb.DuckDBPyConnection, base: str, fixed: dict[str, Any]) -> dict[str, Any]:
    suite = fixed["suite"]
    of = partial(newest_items, ledger, base, fixed["policy"], suite)
    mine, champion = of(fixed["digest"]), of(fixed["champion"])
    common = [item for item in mine if item in champion]
    against = None
    if common and fixed["champion"] != fixed["digest"]:
        own, others = ([side[item]["score"] for item in common] for side in (mine, champion))
        against = paired_difference(own, others)
    verdicts = ledger.execute(VERDICTS, [fixed["policy"], fixed["digest"]]).fetchall()
    return {
        "score": mean_score(suite, mine),
        "base_score": mean_score(suite, of(None)),
        "parent_score": mean_score(suite, of(fixed["parent"])) if fixed["parent"] else None,
        "champion_score": mean_score(suite, champion) if fixed["champion"] else None,
        "against_champion": against,
        "verdicts": tuple(VerdictRow(*row) for row in verdicts),
    }


def why(params: Params, subject: str) -> Chain:
    """Explain a request id, `policy@digest`, the first digits of a digest, or a policy's champion.

    Raises `NotFound` when `subject` is none of them, `Conflict` when several digests start with it.
    """
    with open_catalog(params.paths) as catalog, open_ledger(params.paths.ledger_snapshot) as ledger:
        answer = _answer(ledger, subject)
        if answer:
            policy, digest = answer["policy"], answer["digest"]
        else:
            policy, digest = _find(catalog, subject)
        first = (_answer_link(ledger, answer),) if answer else ()
        if digest is None:
            return Chain(subject, policy, None, first + _base_links(catalog, ledger, policy))
        return Chain(subject, policy, digest, first + _links(params, catalog, ledger, str(policy), digest))


def _answer(ledger: duckdb.DuckDBPyConnection, subject: str) -> dict[str, Any] | None:
    return next(iter(named_rows(ledger.execute(ANSWER, [subject]))), None)


def _find(catalog: Catalog, subject: str) -> tuple[str, str | None]:
    policy, prefix = split_served_name(subject)
    if prefix:
        return policy, catalog.revisions.get(policy, prefix).digest
    revisions = catalog.listing.starting_with(subject, limit=3) if len(subject) >= DIGITS else []
    if len(revisions) > 1:
        names = ", ".join(served_name(item.policy, item.digest) for item in revisions)
        raise Conflict(f"Several digests start with {subject!r}: {names}. Name one as POLICY@DIGEST.")
    if revisions:
        return revisions[0].policy, revisions[0].digest
    try:
        return subject, catalog.routes.get(subject).champion
    except NotFound:
        raise NotFound(
            f"There is no answer, revision or policy {subject!r}. Give an answer's `id`, POLICY@DIGEST, at "
            f"least {DIGITS} digits of a digest, or a policy. Answers appear here after a few seconds."
        ) from None


def _answer_link(ledger: duckdb.DuckDBPyConnection, answer: dict[str, Any]) -> Link:
    routed = ledger.execute(ROUTED, [answer["policy"], answer["route_version"]]).fetchone()
    who = answer["unit"] or "unknown"
    reward = f"rated {answer['reward']:g}" if answer["reward"] is not None else "not rated"
    says = (
        f"{moment(answer['at'])}, purpose {answer['purpose']}, unit {who}: answered by {answer['arm']}, "
        f"status {answer['status']}, {answer['completion_tokens'] or 0} tokens, {reward}."
    )
    if routed:
        says += f" The route was set by {routed[1]} at {moment(routed[0])}: {routed[2]}"
        answer |= {"route": {"at": routed[0], "by": routed[1], "reason": routed[2]}}
    return Link("answer", True, says, answer)


def _base_links(catalog: Catalog, ledger: duckdb.DuckDBPyConnection, policy: str | None) -> tuple[Link, ...]:
    says = "The base, requested by its own name."
    scores = Link("scores", False, "Scores of the base belong to a policy's suite.")
    if policy:
        says = f"The base, since {policy!r} had no champion."
        entry = catalog.policies.get(policy)
        suite = str(entry.config.get("suite", ""))
        score = suite_score(ledger, entry.base, policy, suite, None)
        words = f"{score.mean:.1%} [{score.ci_low:.1%}, {score.ci_high:.1%}]" if score else "not scored"
        scores = Link("scores", bool(score), f"{suite}: base {words}.", vars(score) if score else {})
    return (
        Link("revision", True, says),
        Link("verdict", False, "The base has no verdicts: it is the baseline of revisions."),
        scores,
        *(Link(name, False, NOT_BASE) for name in ("run", "data", "commit")),
    )


def _links(
    params: Params, catalog: Catalog, ledger: duckdb.DuckDBPyConnection, policy: str, digest: str
) -> tuple[Link, ...]:
    try:
        revision = catalog.revisions.get(policy, digest)
    except NotFound:
        return _expired(ledger, policy, digest)
    facts = gather(params, policy, digest)
    manifest = stored_manifest(params.paths.revision(revision.policy, revision.digest))
    return (
        _revision_link(catalog, revision),
        _verdict_link(catalog, facts),
        _scores_link(facts),
        flipped_items(ledger, facts.suite, revision, catalog.routes.get(policy)),
        _run_link(facts, revision, manifest),
        _data_link(ledger, catalog, revision, manifest),
        commit_link(str(manifest.get("code_version", ""))),
    )


def _expired(ledger: duckdb.DuckDBPyConnection, policy: str, digest: str) -> tuple[Link, ...]:
    """Explain a training step's adapter that has expired."""
    row = ledger.execute(STEP, [policy, digest]).fetchone()
    gone = f"{served_name(policy, digest)} is no longer in the catalog: adapters of training steps expire."
    run = f"Step {row[1]} of training {row[0]} sampled from it." if row else "No training step names it."
    facts = {"session": row[0], "step": row[1]} if row else {}
    rest = ("data", "commit")
    return (
        Link("revision", True, gone, {"policy": policy, "digest": digest}),
        Link("verdict", False, "Adapters of training steps are never released."),
        Link("scores", False, "Adapters of training steps are not scored."),
        Link("run", bool(row), run, facts),
        *(Link(name, False, "Only exported revisions record it.") for name in rest),
    )


def _revision_link(catalog: Catalog, revision: Revision) -> Link:
    role = role_of(catalog.routes.get(revision.policy), revision.digest) or "in no route"
    stone = catalog.tombstones.find(revision.policy, revision.digest)
    probe = (revision.probe or {}).get("reason", "The effect probe has not run.")
    parent = revision.parent[:DIGEST12] if revision.parent else "the base"
    start, _, digest = (catalog.policies.get(revision.policy).config.get("start") or "").partition("@")
    if digest and (revision.parent or "").startswith(digest):
        parent = served_name(start, revision.parent or "")
    says = (
        f"{served_name(revision.policy, revision.digest)}, trained from {parent}, step {revision.step}, "
        f"rank {revision.rank}, {revision.state} {moment(revision.created_at)}; now {role}. {probe}"
    )
    if stone:
        says += f" It has a tombstone by {stone.by}: {stone.reason}"
    facts = {
        "policy": revision.policy, "digest": revision.digest, "parent": revision.parent,
        "base": revision.base, "step": revision.step, "rank": revision.rank, "state": revision.state,
        "created_at": revision.created_at, "role": role, "probe": revision.probe,
        "tombstone": vars(stone) if stone else None,
    }  # fmt: skip
    return Link("revision", True, says, facts)


def _verdict_link(catalog: Catalog, facts: VersionFacts) -> Link:
    running = [it for it in catalog.releases.all(facts.policy, open_only=True) if it.revision == facts.digest]
    verdicts = [vars(item) for item in facts.verdicts]
    if running:
        says = f"Its release is running, at step {running[0].step!r}. {running[0].reason}"
        return Link("verdict", True, says, {"running": running[0].step, "verdicts": verdicts})
    if not facts.verdicts:
        return Link("verdict", False, "It has no verdict yet.", {"verdicts": []})
    says = " ".join(f"{it.verdict} by {it.by} at {moment(it.at)}: {it.reason}" for it in facts.verdicts[:3])
    return Link("verdict", True, says, {"verdicts": verdicts})


def _scores_link(facts: VersionFacts) -> Link:
    named = {
        "revision": facts.score, "parent": facts.parent_score,
        "champion": facts.champion_score, "base": facts.base_score,
    }  # fmt: skip
    scores = {name: vars(score) for name, score in named.items() if score}
    if facts.score is None:
        return Link("scores", False, f"It was not scored on {facts.suite or 'any suite'}.", scores)
    words = ", ".join(
        f"{name} {score.mean:.1%} [{score.ci_low:.1%}, {score.ci_high:.1%}]"
        for name, score in named.items()
        if score
    )
    says = f"{facts.suite}, {facts.score.items} items: {words}."
    if facts.against_champion:
        paired = facts.against_champion
        says += f" Against the champion {paired.mean:+.1%} [{paired.low:+.1%}, {paired.high:+.1%}]."
    return Link("scores", True, says, scores)


def _run_link(facts: VersionFacts, revision: Revision, manifest: Mapping[str, Any]) -> Link:
    session = manifest.get("config", {}).get("session")
    if not session:
        return Link("run", False, _no_manifest(revision))
    details = {
        "session": session,
        "steps": len(facts.steps),
        "tokens": facts.tokens,
        "seconds": facts.seconds,
    }
    if not facts.steps:
        return Link("run", True, f"Training {session}; the ledger has no step of it.", details)
    came_to = spoken([Curve(facts.policy, facts.digest, facts.steps, session)])
    says = f"Training {session}: {came_to}; {sum(facts.seconds.values()):.0f} s in total."
    return Link("run", True, says, details)


def _data_link(
    ledger: duckdb.DuckDBPyConnection, catalog: Catalog, revision: Revision, manifest: Mapping[str, Any]
) -> Link:
    config = manifest.get("config")
    if not config:
        return Link("data", False, _no_manifest(revision))
    if imported := config.get("import"):
        made = f" It was made for the base {imported['named_base']}." if imported["named_base"] else ""
        return Link("data", False, f"The adapter was imported; its data is not known here.{made}", imported)
    suites = dict(ledger.execute(SUITE, [revision.policy, revision.digest]).fetchall())
    details = {name: config.get(name) for name in ("task", "data_digest", "seed", "line_seed", "suite")}
    details |= {"judged_by": contract_of(config), "suite_versions": suites}
    data = f" with the data {config['data_digest'][:DIGEST12]}" if config.get("data_digest") else ""
    scored = ", ".join(f"{suite} version {version}" for suite, version in suites.items())
    says = f"Task {task_of(config)}{data}, judged by {details['judged_by']}, seed {details['line_seed']}."
    return Link("data", True, says + (f" Scored on {scored}." if scored else ""), details)


def commit_link(code_version: str) -> Link:
    """Return the commit of a code version such as `0.1.0+g13ad72a0c1b2.dirty`."""
    version, _, local = code_version.partition("+g")
    commit, _, dirty = local.partition(".")
    details = {"version": version or None, "commit": commit or None, "dirty": bool(dirty)}
    if not version:
        return Link("commit", False, "The revision's manifest is not on this machine.", details)
    if not commit:
        return Link("commit", False, f"Version {version}; no commit was recorded.", details)
    changed = ", with uncommitted changes" if dirty else ""
    return Link("commit", True, f"{commit} of version {version}{changed}.", details)


def _no_manifest(revision: Revision) -> str:
    if revision.state == "snapshot":
        return "Adapters of training steps have no manifest."
    return "This machine has no manifest of it."


def moment(seconds: float) -> str:
    """Return epoch seconds as a UTC time such as `2026-05-13 08:00:00 UTC`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
