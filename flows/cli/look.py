"""Read-only commands: status, ls, quality, why, replay, report, usage.

`status` asks the services' supervisor, the trainer and the engine; the others read the catalog and the
ledger's snapshot, so they also work while nothing runs.
"""

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.errors import ConfigError
from engine.services import lifecycle as services
from engine.settings.params import Params
from flows.entry import PARAMS, Json, ParamsFile, enter, print_json, print_result
from tasks.outcome import local_key
from tasks.publish import write_report
from tasks.usage import as_table, usage_by

app = typer.Typer()
LOOK = "Reports and checks"
PATIENCE_S = 5.0
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="Show at most this many lines, newest first.")]


@app.command()
def status(
    sessions: Annotated[
        bool, typer.Option("--sessions", help="List the trainer's sessions: step, memory, bytes, holder.")
    ] = False,
    residency: Annotated[
        bool,
        typer.Option("--residency", help="Show where each adapter is (stored, host, slot), loads and waits."),
    ] = False,
    limit: Annotated[
        int, typer.Option(min=1, max=10_000, help="With --residency: show at most this many revisions.")
    ] = 50,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Show each service's state, address and age, running releases, alarms, and runs that found no slot.

    With --sessions or --residency, show what the trainer or the engine holds instead.
    """
    settings = enter(params)
    if sessions:
        return print_sessions(settings, as_json)
    if residency:
        return print_residency(settings, limit, as_json)
    from tasks.look import shown_releases, shown_service, standing

    states, now = services.status(settings), standing(settings)
    if as_json:
        return print_json({"services": [asdict(state) for state in states], **now})
    from flows.display import print_rows

    print_rows([shown_service(state) for state in states])
    for alarm in now["alarms"]:
        say(f"Alarm: {alarm}")
    if now["frozen"]:
        say(
            "Releases are frozen: promotions and canaries are blocked. `graftwork decide thaw` allows them "
            "again."
        )
    if now["releases"]:
        print_rows(shown_releases(now["releases"]), fold=("release", "has", "needs"))
    for one in now["engines"]:
        drains = ", draining" if one["draining"] else ""
        say(f"Engine {one['id']} at {one['url']}: last beat {one['beat_s']:g} s ago{drains}.")
    for notice in now["notices"]:
        say(f"{notice['name']}: {notice['reason']}")
    from tasks.stuck_runs import KeptOutRuns

    for row in now["cancelled"]:
        say(str(KeptOutRuns(**row)))


def print_sessions(settings: Params, as_json: bool) -> None:
    """Print the sessions that the trainer has."""
    from engine.training.service.client import TrainerClient
    from tasks.look import shown_session

    with TrainerClient.of(settings, patience_s=PATIENCE_S) as trainer:
        rows = trainer.sessions()
    print_result(as_json, rows, [shown_session(row) for row in rows], fold=("session", "writer"))


def print_residency(settings: Params, limit: int, as_json: bool) -> None:
    """Print the tiers, the queue of cold loads, and each revision's loads and waits."""
    from tasks import residency as tiers

    tables = tiers.residency(settings, limit)
    if as_json:
        return print_json(tables)
    from flows.display import console, print_row, print_rows

    if not tables["engine"]:
        say("No engine is running, so every revision is `stored`.")
    print_row(tiers.facts(tables))
    print_rows([tiers.shown(row) for row in tables["revisions"]], fold=("revision",))
    for row in tables["quarantined"]:
        console.print(f"{row['revision']} is in quarantine: {row['reason']}", markup=False)
    for row in tables["revisions"]:
        if row.get("last_fault"):
            console.print(f"{row['revision']}: {row['last_fault']}", markup=False)


@app.command()
def ls(
    policy: Annotated[
        str | None, typer.Argument(help="List this policy's revisions. Default: list the policies.")
    ] = None,
    trainable: Annotated[
        bool, typer.Option("--trainable", help="List the policies that can be trained here.")
    ] = False,
    limit: Limit = 20,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """List policies, or one policy's revisions, with scores, users' rewards and verdicts."""
    settings = enter(params)
    from tasks import look

    if trainable and policy:
        raise ConfigError("Give a policy or --trainable, not both.")
    if trainable:
        return print_result(as_json, look.trainable(settings), fold=("policy", "owner", "verifier"))
    fresh = look.as_of(settings)
    rows: list[Any]
    if policy is None:
        rows, total = look.policies(settings, limit)
        shown = [look.shown_policy(row) for row in rows]
    else:
        rows, total = look.revisions(settings, policy, limit)
        shown = [look.shown_revision(row, time.time()) for row in rows]
    if as_json:
        kind = "policies" if policy is None else "revisions"
        return print_json({"as_of": fresh, "total": total, kind: [asdict(row) for row in rows]})
    from flows.display import print_rows

    print_rows(shown, fold=("policy", "canary", "users"))
    say(f"{len(rows)} of {total} shown; `--limit` shows more." if total > len(rows) else "")
    say(look.note(fresh))


@app.command()
def quality(
    policy: Annotated[str, typer.Argument(help="Policy whose revisions are shown.")],
    segment: Annotated[
        str | None, typer.Option(help="Show the items of this segment. Default: all, and each segment.")
    ] = None,
    limit: Limit = 20,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Show each revision's score, gain, users' ratings, evaluators, latency and cost, by segment."""
    settings = enter(params)
    from tasks import look
    from tasks import quality as found_quality

    fresh, found = look.as_of(settings), found_quality.quality_of(settings, policy, segment, limit)
    if as_json:
        return print_json({"as_of": fresh, **found_quality.as_json(found)})
    from flows.display import print_rows

    print_rows(found_quality.as_table(found), fold=("better by", "evaluators", "cost"))
    for sentence in (*found["notes"], found["calibration"], look.note(fresh)):
        say(sentence)


@app.command()
def why(
    subject: Annotated[str, typer.Argument(help="Response id, POLICY@DIGEST, digest or policy.")],
    samples: Annotated[
        int | None,
        typer.Option(min=4, max=64, help="Also compare so many answers, such as 16, to each uncertain item."),
    ] = None,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Explain where an answer or a revision comes from: verdict, scores, items, run, data, commit.

    Items are those won and lost against the champion, of the champion against the one before. With --samples
    the running engine answers the suite's uncertain items, and those whose chance differs are listed.
    """
    settings = enter(params)
    if samples:
        services.require_running(settings)
    from tasks import look

    fresh, chain = look.as_of(settings), look.explain(settings, subject)
    if samples and chain.policy and chain.digest:
        from tasks.flips import sampled_flips

        found = sampled_flips(settings, chain.policy, chain.digest, samples, local_key(settings))
        chain = replace(chain, links=(*chain.links, found))
    if as_json:
        return print_json({"as_of": fresh, **asdict(chain)})
    from flows.display import print_links

    print_links(chain.links)
    say(look.note(fresh))


@app.command(rich_help_panel=LOOK)
def replay(
    release: Annotated[str, typer.Argument(help="Release id; or POLICY, POLICY@DIGEST: its newest.")],
    alpha: Annotated[
        float | None, typer.Option(min=1e-9, max=0.5, help="Level. Default: the release's own.")
    ] = None,
    margin: Annotated[
        float | None, typer.Option(min=0, max=1, help="Margin of the reward. Default: the release's own.")
    ] = None,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Judge a release's canary again from the ledger, with another level or margin; changes nothing."""
    settings = enter(params)
    from tasks.replay import replay as judge_again

    verdict = judge_again(settings, release, alpha, margin)
    if as_json:
        return print_json(asdict(verdict))
    judged = f"at level {verdict.alpha:g} and margin {verdict.margin:g}"
    units = f"{verdict.canary_units} canary and {verdict.baseline_units} baseline units"
    say(f"{verdict.revision} {judged}: {verdict.verdict} after {verdict.seconds:.1f} s, {units}.")
    say(f"  {verdict.reason}")
    say(f"Recorded: {verdict.recorded}. {verdict.recorded_reason}")


@app.command(rich_help_panel=LOOK)
def report(as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """Write the HTML report of everything in the ledger to the state directory, and print its path."""
    settings = enter(params)
    path: Path = write_report(settings, settings.paths.runs / "report.html", 0.0, time.time(), {})
    if as_json:
        return print_json({"path": str(path)})
    say(f"The report is {path}.")


@app.command(rich_help_panel=LOOK)
def usage(
    by: Annotated[str, typer.Option(help="Sum up by tenant, key, policy or revision.")] = "tenant",
    begin: Annotated[str | None, typer.Option("--from", help="First hour (UTC), such as 2026-11-01.")] = None,
    end: Annotated[str | None, typer.Option("--to", help="First hour that is left out.")] = None,
    as_json: Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Show requests, tokens and prices, by purpose; without --from and --to of all time.

    Tokens of requests whose gateway was killed are `unknown`: they count at what was reserved.
    """
    rows = usage_by(enter(params), by, begin, end)
    if as_csv:
        return typer.echo(as_table(rows), nl=False)
    print_result(as_json, rows, fold=(by,))


def say(sentence: str) -> None:
    """Print a sentence, unless it is empty."""
    if sentence:
        typer.echo(sentence)
