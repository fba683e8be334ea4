"""Commands about single adapters: list and look, lineage, bring in and write out, retire, expire.

They need the catalog and the store, no service; whatever runs sees what they change within a second.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.errors import ConfigError
from engine.services import lifecycle as services
from engine.settings.params import served_name
from flows.entry import PARAMS, Again, By, Json, ParamsFile, Reason, ReuseName, enter
from tasks.outcome import Stages, local_key
from tasks.purged_names import reuse_purged_name

app = typer.Typer()
adapters_app = typer.Typer(
    help="Single adapters: ls, show, lineage, import, export, retire, expire.", no_args_is_help=True
)
app.add_typer(adapters_app, name="adapters")
# Widths of the list: the narrowest terminal, POLICY@DIGEST12 at its longest, and what an owner gets at least.
NARROWEST, LONGEST_NAME, OWNER = 72, 76, 14
Name = Annotated[str, typer.Argument(help="POLICY@DIGEST; at least 4 digits of the digest.")]


@adapters_app.command("ls")
def ls(
    policy: Annotated[str | None, typer.Argument(help="Only this policy's, newest first.")] = None,
    owner: Annotated[str | None, typer.Option(help="Only this owner's.")] = None,
    retired: Annotated[bool, typer.Option("--retired", help="Retired ones too.")] = False,
    after: Annotated[str | None, typer.Option(help="Go on after this name, the last one seen.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="How many at most; 0: all, page by page.")] = 100,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """List revisions: state, step, rank, bytes, owner; a million never lie in memory."""
    settings = enter(params)
    from engine.catalog.catalog import open_catalog
    from tasks import adapters

    with open_catalog(settings.paths) as catalog:
        rows = (
            adapters.shown(row)
            for page in adapters.pages(catalog, policy, owner, retired, after)
            for row in page
        )
        print_list(rows, limit, as_json)


def print_list(rows: Iterator[dict[str, Any]], limit: int, as_json: bool) -> None:
    """Print rows as they come; say how to go on when there are more than `limit`."""
    write = _json_row if as_json else _table_row
    count, last, more = 0, None, False
    # What is refused is refused before anything is printed.
    head = list(islice(rows, 1))
    if as_json:
        typer.echo('{"revisions": [', nl=False)
    for row in chain(head, rows):
        if limit and count == limit:
            more = True
            break
        write(row, count == 0)
        count, last = count + 1, row["name"]
    if as_json:
        return typer.echo(f'\n], "next": {json.dumps(last if more else None)}}}')
    if not count:
        typer.echo("None.")
    elif more:
        typer.echo(f"There are more: `--after {last}` goes on, `--limit 0` shows all.")


def _json_row(row: dict[str, Any], first: bool) -> None:
    typer.echo(("\n " if first else ",\n ") + json.dumps(row), nl=False)


def _table_row(row: dict[str, Any], first: bool) -> None:
    if first:
        _table_line("name", "state", "step", "rank", "bytes", "owner")
    size = f"{row['bytes']:,}"
    _table_line(row["name"], row["state"], row["step"], row["rank"], size, row["owner"])


def _table_line(name: str, state: str, step: Any, rank: Any, size: str, owner: str) -> None:
    """Print a line of the list; where the terminal is too narrow, name and owner wrap."""
    from flows.display import console

    middle = f"  {state:<8} {step:>6} {rank:>4} {size:>11}  "
    width = max(NARROWEST, console.width) - len(middle)
    names = min(LONGEST_NAME, width - OWNER)
    owners = width - names
    parts = (range(0, len(name), names), range(0, len(owner), owners))
    for at, of in zip_longest(*parts):
        part = "" if at is None else name[at : at + names]
        rest = "" if of is None else owner[of : of + owners]
        typer.echo(f"{part:<{names}}{middle}{rest}".rstrip())
        middle = " " * len(middle)


@adapters_app.command("show")
def show(name: Name, as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """Show all that the catalog knows of a revision."""
    settings = enter(params)
    from engine.catalog.catalog import open_catalog
    from tasks import adapters

    with open_catalog(settings.paths) as catalog:
        found = adapters.described(settings, catalog, adapters.find(catalog, name))
    if as_json:
        return typer.echo(json.dumps(found, indent=2))
    from flows.display import print_row

    print_row({key: value for key, value in found.items() if value not in (None, [], {})})


@adapters_app.command("lineage")
def lineage(name: Name, as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """Show what a revision was trained from, and what was trained from it, as a tree."""
    settings = enter(params)
    from engine.catalog.catalog import open_catalog
    from tasks import adapters

    with open_catalog(settings.paths) as catalog:
        leaves, more = adapters.lineage(catalog, adapters.find(catalog, name))
    if as_json:
        rows = [
            {"depth": leaf.depth, "parent": leaf.row.parent} | adapters.shown(leaf.row) for leaf in leaves
        ]
        return typer.echo(json.dumps({"lineage": rows, "more": more}, indent=2))
    top = min(leaf.depth for leaf in leaves)
    for leaf in leaves:
        mark = "  <-" if leaf.depth == 0 else ""
        row = adapters.shown(leaf.row)
        typer.echo(f"{'  ' * (leaf.depth - top)}{row['name']}  step {row['step']}, {row['state']}{mark}")
    if more:
        typer.echo(f"Only {adapters.TREE} are shown in each direction; ask for one of them to go on.")


@adapters_app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="Its directory: adapter_config.json and safetensors.")],
    policy: Annotated[
        str | None, typer.Option(help="The policy that it becomes a revision of; none: only look at it.")
    ] = None,
    owner: Annotated[str, typer.Option(help="Whose policy it is.")] = "local",
    reuse_name: ReuseName = False,
    again: Again = False,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Detect an adapter's layout, print what it holds, and import it as a revision of a policy."""
    settings = enter(params)
    from engine.publishing.foreign import inspect, publish
    from engine.training.service.probing import probe_by_base
    from flows import display
    from tasks.serve import prove

    say = _silent if as_json else typer.echo
    display.base_builder(settings, Stages())()
    foreign, base = inspect(settings, path)
    found, digest = foreign.found, foreign.digest(base.digest)
    if not as_json:
        ranks = ", ".join(f"{rank} on {count}" for rank, count in found.ranks.items())
        display.print_row(asdict(found) | {"ranks": f"{ranks} modules", "digest": digest})
    if policy is None:
        say("Nothing was imported: give --policy NAME to import it.")
        return _print_import(asdict(found), digest, None, None) if as_json else None
    reuse_purged_name(settings, policy, owner, reuse_name or again)
    manifest = publish(settings, path, foreign, base, policy, owner, probe_by_base(settings, base, say))
    name, proven = served_name(policy, manifest.digest), None
    say(f"It is imported as {name}.")
    if any(state.name == "engine" and state.state == "running" for state in services.status(settings)):
        proven = str(prove(settings, policy, manifest.digest, local_key(settings)))
        say(f"Effect probe: {proven}")
    else:
        say(f"No engine is up to prove it: `graftwork serve --revision {name}` does.")
    if as_json:
        _print_import(asdict(found), manifest.digest, name, proven)


def _silent(_: str) -> None:
    """Say nothing beside JSON."""


def _print_import(found: dict[str, Any], digest: str, name: str | None, proven: str | None) -> None:
    typer.echo(json.dumps({"found": found, "digest": digest, "imported": name, "probe": proven}, indent=2))


@adapters_app.command("export")
def export(
    name: Name,
    path: Annotated[Path, typer.Argument(help="The directory to make; with --packed the file.")],
    packed: Annotated[
        bool, typer.Option("--packed", help="One safetensors file, as the engine's slots have it.")
    ] = False,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Write a revision as a directory that peft opens, or as its packed file; never over anything."""
    settings = enter(params)
    from engine.catalog.catalog import open_catalog
    from tasks import adapters

    with open_catalog(settings.paths) as catalog:
        row = adapters.find(catalog, name)
        written = adapters.export(settings, catalog, row, path, packed)
    told(
        as_json,
        f"{served_name(row.policy, row.digest)} is in {written}.",
        path=str(written),
        digest=row.digest,
    )


@adapters_app.command("retire")
def retire(
    name: Name, reason: Reason, by: By = "cli", as_json: Json = False, params: ParamsFile = PARAMS
) -> None:
    """Serve a revision to nobody but scoring from now on, with a reason; its bytes stay."""
    settings = enter(params)
    _require(reason)
    from engine.catalog.catalog import open_catalog
    from tasks import adapters

    with open_catalog(settings.paths) as catalog:
        before = adapters.find(catalog, name)
        row = catalog.lifecycle.retire(before.policy, before.digest, by, reason)
    is_new = before.retired_at is None
    done = "is retired." if is_new else f"was retired already, by {row.retired_by}: {row.retired_reason}"
    told(
        as_json,
        f"{served_name(row.policy, row.digest)} {done}",
        digest=row.digest,
        by=row.retired_by,
        reason=row.retired_reason,
    )


@adapters_app.command("unretire")
def unretire(
    name: Name, reason: Reason, by: By = "cli", as_json: Json = False, params: ParamsFile = PARAMS
) -> None:
    """Take a retirement back, with a reason."""
    settings = enter(params)
    _require(reason)
    from engine.catalog.catalog import open_catalog
    from tasks import adapters

    with open_catalog(settings.paths) as catalog:
        row = adapters.find(catalog, name)
        catalog.lifecycle.unretire(row.policy, row.digest, by, reason)
    shown = served_name(row.policy, row.digest)
    if row.retired_at is None:
        return told(as_json, f"{shown} was not retired; nothing has changed.", digest=row.digest)
    told(as_json, f"{shown} is served again.", digest=row.digest, by=by, reason=reason)


@adapters_app.command("expire")
def expire(
    name: Name,
    after: Annotated[str | None, typer.Option("--in", help="From now: a number and s, m, h, d or w.")] = None,
    never: Annotated[bool, typer.Option("--never", help="Keep it.")] = False,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Say when a revision's row goes, unless a route or a release names it by then."""
    settings = enter(params)
    from engine.catalog.catalog import open_catalog
    from tasks import adapters

    at = adapters.expiry(after, never, time.time())
    with open_catalog(settings.paths) as catalog:
        row = adapters.find(catalog, name)
        catalog.lifecycle.set_expiry(row.policy, row.digest, at)
    when = "never expires" if at is None else f"expires in {after}"
    told(as_json, f"{served_name(row.policy, row.digest)} {when}.", digest=row.digest, expires_at=at)


def _require(reason: str) -> None:
    if not reason.strip():
        raise ConfigError("Give a reason; it is recorded and shown to whoever asks for the revision.")


def told(as_json: bool, sentence: str, **said: Any) -> None:
    """Print a sentence, or the same as JSON."""
    typer.echo(json.dumps({"done": sentence, **said}) if as_json else sentence)
