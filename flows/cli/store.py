"""Commands that keep the store of packed bytes whole and small; each may be killed and run again."""

import json
import resource
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.errors import AdapterError
from flows.entry import PARAMS, Json, ParamsFile, enter

if TYPE_CHECKING:
    from engine.publishing.maintenance import Report

app = typer.Typer()
store_app = typer.Typer(help="Keep the packed bytes whole and small.", no_args_is_help=True)
app.add_typer(store_app, name="store")
SAID_EVERY_S = 5.0


@store_app.command("verify")
def verify(as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """Read every revision's bytes and compare checksum and layout; what is damaged is quarantined.

    What is missing is reported, and stays as it is.
    """
    from engine.publishing import maintenance

    _run(params, as_json, maintenance.verify)


@store_app.command("gc")
def gc(as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """Remove segments that no revision names, and drafts that a crash left."""
    from engine.publishing import maintenance

    _run(params, as_json, maintenance.gc)


@store_app.command("compact")
def compact(
    threshold: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Rewrite segments of which less than this is live; 1: all with garbage."
        ),
    ] = 0.5,
    everything: Annotated[bool, typer.Option("--all", help="Rewrite every segment.")] = False,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Rewrite segments that are mostly garbage. Their room is free once no running engine has them open."""
    from engine.publishing import maintenance

    _run(params, as_json, maintenance.compact, threshold=threshold, everything=everything)


@store_app.command("repack")
def repack(as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """Derive the packed form anew where this version packs otherwise, as after an engine upgrade."""
    from engine.publishing import repacking

    _run(params, as_json, repacking.repack)


def _run(params: ParamsFile, as_json: bool, operation: Callable[..., "Report"], **options: Any) -> None:
    """Run an operation, print its report, and end with an error when something is damaged."""
    settings = enter(params)
    from engine.catalog.catalog import open_catalog
    from engine.store.open import open_store

    began, paths = time.monotonic(), settings.paths
    # One that is not there is refused, not made.
    with (
        open_catalog(paths, migrated=paths.has_catalog) as index,
        closing(open_store(settings)) as store,
    ):
        report = operation(index, store, on_page=_progress(), **options)
    found = asdict(report) | {
        "seconds": round(time.monotonic() - began, 3),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if as_json:
        typer.echo(json.dumps(found))
    else:
        from flows.display import print_row, print_rows

        examples = found.pop("examples")
        print_row(found)
        if examples:
            print_rows(examples, fold=("revision", "fault"))
    if report.damaged:
        count = f"{report.damaged} revisions are" if report.damaged > 1 else "1 revision is"
        raise AdapterError(
            f"{count} damaged and will not be served; the others are not affected. "
            "Restore the segments from a backup and run `graftwork store verify`, or export those revisions "
            "again."
        )
    if report.unreadable:
        count = f"{report.unreadable} revisions" if report.unreadable > 1 else "1 revision"
        raise AdapterError(
            f"{count} could not be read, since bytes or a base are not there for the moment. Nothing was "
            "changed about them: put back what is named above and run this again."
        )


def _progress() -> Callable[["Report"], None]:
    """Return what says on stderr, now and then, how far it is."""
    said = time.monotonic()

    def say(report: "Report") -> None:
        nonlocal said
        if time.monotonic() - said >= SAID_EVERY_S:
            said = time.monotonic()
            gib = report.bytes / (1 << 30)
            line = (
                f"{report.operation}: {report.revisions:,} revisions, {gib:.2f} GiB, {report.moved:,} moved"
            )
            print(f"{line}, {report.removed:,} segments removed", file=sys.stderr, flush=True)

    return say
