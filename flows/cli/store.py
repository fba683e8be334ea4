"""Commands that check and maintain the store of packed adapters; each is crash-safe and can be run again."""

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
store_app = typer.Typer(
    help="Verify, garbage collect, compact and repack the store of packed adapters.", no_args_is_help=True
)
app.add_typer(store_app, name="store")
SAID_EVERY_S = 5.0


@store_app.command("verify")
def verify(as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """Check every revision's bytes against its checksum and layout; quarantine damaged revisions.

    Missing bytes are reported, and nothing is changed.
    """
    from engine.publishing import maintenance

    _run(params, as_json, maintenance.verify)


@store_app.command("gc")
def gc(as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """Remove segments that no revision uses, and temporary files that a crash left."""
    from engine.publishing import maintenance

    _run(params, as_json, maintenance.gc)


@store_app.command("compact")
def compact(
    threshold: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Rewrite segments with a smaller live share than this; 1: all with garbage.",
        ),
    ] = 0.5,
    everything: Annotated[bool, typer.Option("--all", help="Rewrite every segment.")] = False,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Rewrite segments that are mostly garbage.

    The disk space is free once no running engine has the old segments open.
    """
    from engine.publishing import maintenance

    _run(params, as_json, maintenance.compact, threshold=threshold, everything=everything)


@store_app.command("repack")
def repack(as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """Rebuild packed files whose format differs from this version's, as after an engine upgrade."""
    from engine.publishing import repacking

    _run(params, as_json, repacking.repack)


def _run(params: ParamsFile, as_json: bool, operation: Callable[..., "Report"], **options: Any) -> None:
    """Run an operation and print its report; raise `AdapterError` for damaged or unreadable revisions."""
    settings = enter(params)
    from engine.catalog.opening import open_catalog
    from engine.store.open import open_store

    began, paths = time.monotonic(), settings.paths
    # Do not create a catalog that is not there.
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
            f"{count} damaged and will not be served. Restore the segments from a backup and run "
            "`graftwork store verify`, or export the revisions again. Other revisions are not affected."
        )
    if report.unreadable:
        count = f"{report.unreadable} revisions" if report.unreadable > 1 else "1 revision"
        raise AdapterError(
            f"{count} could not be read, because bytes or a base are missing; see above. "
            "Nothing was changed. Restore what is missing and run the command again."
        )


def _progress() -> Callable[["Report"], None]:
    """Return a function that prints progress to stderr, at most every `SAID_EVERY_S` seconds."""
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
