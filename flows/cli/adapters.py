"""Commands for single adapters: list, show, import, export, retire.

They need the catalog and the store, but no running service. Running services apply a change within a second.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain, islice, zip_longest
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.catalog.records import served_name
from engine.errors import ConfigError
from engine.services import lifecycle as services
from engine.settings.params import Params
from flows.entry import PARAMS, By, Json, ParamsFile, ReuseName, enter, print_done, print_json, seconds_of
from tasks.outcome import Stages, local_key
from tasks.purge_record import reuse_purged_name

if TYPE_CHECKING:
    from engine.catalog.catalog import Catalog, Revision

app = typer.Typer()
adapters_app = typer.Typer(
    help="List, show, import, export and retire single adapters.", no_args_is_help=True
)
app.add_typer(adapters_app, name="adapters")
# Widths of the list: the narrowest terminal, POLICY@DIGEST12 at its longest, and what an owner gets at least.
NARROWEST, LONGEST_NAME, OWNER = 72, 76, 14
Name = Annotated[str, typer.Argument(help="Revision as POLICY@DIGEST, with at least 4 digits of the digest.")]


@adapters_app.command("ls")
def ls(
    policy: Annotated[
        str | None, typer.Argument(help="List only this policy's revisions, newest first.")
    ] = None,
    owner: Annotated[str | None, typer.Option(help="List only this owner's revisions.")] = None,
    retired: Annotated[bool, typer.Option("--retired", help="Include retired revisions.")] = False,
    after: Annotated[
        str | None, typer.Option(help="Continue after this revision, the last one listed before.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="List at most this many revisions; 0: no limit.")] = 100,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """List revisions with state, step, rank, bytes and owner.

    Rows are read and printed page by page, so memory does not grow with the catalog.
    """
    settings = enter(params)
    from engine.catalog.opening import open_catalog
    from tasks import adapters

    with open_catalog(settings.paths) as catalog:
        rows = (
            adapters.shown(row)
            for page in adapters.pages(catalog, policy, owner, retired, after)
            for row in page
        )
        print_list(rows, limit, as_json)


def print_list(rows: Iterator[dict[str, Any]], limit: int, as_json: bool) -> None:
    """Print up to `limit` rows as they are read (0: all), and how to continue when there are more."""
    count, last, more = 0, None, False
    # Read the first row before anything is printed, so that an error comes alone.
    head = list(islice(rows, 1))
    if as_json:
        typer.echo('{"revisions": [', nl=False)
    elif head:
        _table_line("name", "state", "step", "rank", "bytes", "owner")
    for row in chain(head, rows):
        if limit and count == limit:
            more = True
            break
        if as_json:
            typer.echo((",\n " if count else "\n ") + json.dumps(row), nl=False)
        else:
            size = f"{row['bytes']:,}"
            _table_line(row["name"], row["state"], row["step"], row["rank"], size, row["owner"])
        count, last = count + 1, row["name"]
    if as_json:
        return typer.echo(f'\n], "next": {json.dumps(last if more else None)}}}')
    if not count:
        typer.echo("None.")
    elif more:
        typer.echo(f"More revisions follow. Continue with `--after {last}`, or list all with `--limit 0`.")


def _table_line(name: str, state: str, step: Any, rank: Any, size: str, owner: str) -> None:
    """Print a line of the list; where the terminal is too narrow, name and owner wrap."""
    from flows.display import console

    middle = f"  {state:<8} {step:>6} {rank:>4} {size:>11}  "
    width = max(NARROWEST, console.width) - len(middle)
    names = min(LONGEST_NAME, width - OWNER)
    parts = (
        wrap(text, room, break_on_hyphens=False) for text, room in ((name, names), (owner, width - names))
    )
    for part, rest in zip_longest(*parts, fillvalue=""):
        typer.echo(f"{part:<{names}}{middle}{rest}".rstrip())
        middle = " " * len(middle)


@adapters_app.command("show")
def show(name: Name, as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """Show everything that the catalog records about a revision, and its ancestors and descendants."""
    from tasks import adapters

    with opened(params, name) as (settings, catalog, row):
        facts = adapters.described(settings, catalog, row)
        leaves, more = adapters.lineage(catalog, row)
    if as_json:
        lineage = [{"depth": depth, "parent": one.parent} | adapters.shown(one) for depth, one in leaves]
        return print_json({**facts, "lineage": lineage, "more": more})
    from flows.display import print_row

    print_row({key: value for key, value in facts.items() if value not in (None, [], {})})
    top, _ = min(leaves, key=lambda leaf: leaf[0])
    for depth, leaf in leaves if len(leaves) > 1 else ():
        one, mark = adapters.shown(leaf), "" if depth else "  <-"
        typer.echo(f"{'  ' * (depth - top)}{one['name']}  step {one['step']}, {one['state']}{mark}")
    if more:
        typer.echo(
            f"The tree stops at {adapters.TREE} revisions in each direction. Ask for one of them to continue."
        )


@adapters_app.command("import")
def import_(
    path: Annotated[
        Path, typer.Argument(help="Adapter directory with adapter_config.json and safetensors files.")
    ],
    policy: Annotated[
        str | None, typer.Option(help="Import as a revision of this policy. Default: inspect only.")
    ] = None,
    owner: Annotated[
        str, typer.Option(help="Import for this owner; another owner's policy is refused.")
    ] = "local",
    reuse_name: ReuseName = False,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Inspect an adapter's layout and tensors and, with --policy, import it as a revision."""
    settings = enter(params)
    from engine.publishing.foreign import inspect, publish
    from engine.training.service.probing import probe_by_base
    from flows import display
    from tasks.serve import prove

    def say(sentence: str) -> None:
        if not as_json:
            typer.echo(sentence)

    display.base_builder(settings, Stages())()
    foreign, base = inspect(settings, path)
    layout, digest = foreign.found, foreign.digest(base.digest)
    if not as_json:
        ranks = ", ".join(f"{rank} on {count}" for rank, count in layout.ranks.items())
        display.print_row(asdict(layout) | {"ranks": f"{ranks} modules", "digest": digest})
    for note in foreign.claims.notes:
        say(note)
    shown: dict[str, Any] = {"found": asdict(layout), "digest": digest, "notes": foreign.claims.notes}
    name, proven = None, None
    if policy is None:
        say("Nothing was imported. Give --policy NAME to import it.")
    else:
        reuse_purged_name(settings, policy, owner, reuse_name)
        make_probe = probe_by_base(settings, base, say)
        manifest = publish(settings, path, foreign, base, policy, owner, make_probe, say)
        shown["peft"] = manifest.config.get("import", {}).get("peft")
        name = served_name(policy, manifest.digest)
        say(f"The adapter is imported as {name}.")
        if any(state.name == "engine" and state.state == "running" for state in services.status(settings)):
            proven = str(prove(settings, policy, manifest.digest, local_key(settings)))
            say(f"Effect probe: {proven}")
        else:
            say(
                "No engine is running, so the effect probe was not checked. "
                f"Run `graftwork serve --revision {name}` to check it."
            )
    if as_json:
        print_json({**shown, "imported": name, "probe": proven})


@adapters_app.command("export")
def export(
    name: Name,
    path: Annotated[Path, typer.Argument(help="Directory to create; with --packed, file to create.")],
    packed: Annotated[
        bool, typer.Option("--packed", help="Write one safetensors file in the engine's slot layout.")
    ] = False,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Write a revision as a directory that PEFT opens, or as its packed file.

    An existing path is refused, never overwritten.
    """
    from tasks import adapters

    with opened(params, name) as (settings, catalog, row):
        written = adapters.export(settings, catalog, row, path, packed)
    print_done(
        as_json,
        f"Exported {served_name(row.policy, row.digest)} to {written}.",
        path=str(written),
        digest=row.digest,
    )


@adapters_app.command("retire")
def retire(
    name: Name,
    reason: Annotated[
        str, typer.Option(help="Why; it is recorded and shown to clients that request the revision.")
    ] = "",
    off: Annotated[bool, typer.Option("--off", help="Serve a retired revision again.")] = False,
    after: Annotated[
        str | None,
        typer.Option("--in", help="Remove it later instead: in a number of s, m, h, d or w, such as 30d."),
    ] = None,
    never: Annotated[bool, typer.Option("--never", help="Never remove it from the catalog.")] = False,
    by: By = "cli",
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Stop serving a revision, except for scoring; its bytes stay in the store. With --off, serve it again.

    With --in, set when it is removed from the catalog; --never takes that back. A revision that a route or a
    release names at that time is kept.
    """
    expires = bool(after or never)
    if sum((bool(after), never, off)) > 1:
        raise ConfigError("Give one of `--in`, such as `--in 30d`, `--never` and `--off`.")
    if not (expires or reason.strip()):
        raise ConfigError("--reason is empty. Give a reason; it is recorded and shown to clients.")
    at = time.time() + seconds_of(after, least=1) if after else None
    with opened(params, name) as (_, catalog, row):
        shown, said = served_name(row.policy, row.digest), {"digest": row.digest}
        if expires:
            catalog.lifecycle.set_expiry(row.policy, row.digest, at)
            done = "never expires." if at is None else f"expires in {after}."
            return print_done(as_json, f"{shown} {done}", **said, expires_at=at)
        if off:
            catalog.lifecycle.retire(row.policy, row.digest, by, reason, back=True)
            if row.retired_at is None:
                return print_done(as_json, f"{shown} was not retired; nothing has changed.", **said)
            return print_done(as_json, f"{shown} is served again.", **said, by=by, reason=reason)
        now = catalog.lifecycle.retire(row.policy, row.digest, by, reason)
    is_new = row.retired_at is None
    done = "is retired." if is_new else f"was retired already, by {now.retired_by}: {now.retired_reason}"
    print_done(as_json, f"{shown} {done}", **said, by=now.retired_by, reason=now.retired_reason)


@contextmanager
def opened(params: Path, name: str) -> Iterator[tuple[Params, "Catalog", "Revision"]]:
    """Give the settings, their catalog and its revision `name`; raises what `adapters.find` raises."""
    from engine.catalog.opening import open_catalog
    from tasks import adapters

    settings = enter(params)
    with open_catalog(settings.paths) as catalog:
        yield settings, catalog, adapters.find(catalog, name)
