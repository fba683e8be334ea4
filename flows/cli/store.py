"""Commands that check and maintain the store of packed adapters; each is crash-safe and can be run again."""

import resource
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from engine.errors import AdapterError
from flows.entry import PARAMS, Json, ParamsFile, enter, now_and_then, print_json

if TYPE_CHECKING:
    from engine.publishing.maintenance import Report

app = typer.Typer()
KEEP = "Keep and remove"


@app.command(rich_help_panel=KEEP)
def store(
    work: Annotated[
        Literal["verify", "gc", "compact", "repack"],
        typer.Argument(metavar="[verify|gc|compact|repack]", help="What to do; verify removes nothing."),
    ] = "verify",
    threshold: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="compact: rewrite segments with a smaller live share than this; 1: all with garbage.",
        ),
    ] = 0.5,
    everything: Annotated[bool, typer.Option("--all", help="compact: rewrite every segment.")] = False,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Verify, garbage collect, compact or repack the store of packed adapters.

    verify: check every revision's bytes against its checksum and layout, and quarantine damaged revisions;
    missing bytes are reported. gc: remove segments that no revision uses, and temporary files that a crash
    left. compact: rewrite segments that are mostly garbage; the disk space is free once no running engine has
    the old ones open. repack: rebuild packed files whose format differs from this version's, as after an
    engine upgrade.
    """
    settings = enter(params)
    from engine.catalog.opening import open_catalog
    from engine.publishing import maintenance, repacking
    from engine.store.open import open_store

    operations: dict[str, Callable[..., Report]] = {
        "verify": maintenance.verify,
        "gc": maintenance.gc,
        "compact": partial(maintenance.compact, threshold=threshold, everything=everything),
        "repack": repacking.repack,
    }
    began, paths, said = time.monotonic(), settings.paths, now_and_then()
    # Do not create a catalog that is not there.
    with open_catalog(paths, migrated=paths.has_catalog) as index, closing(open_store(settings)) as opened:
        report = operations[work](index, opened, on_page=lambda so_far: said(lambda: progress(so_far)))
    fields = asdict(report) | {
        "seconds": round(time.monotonic() - began, 3),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if as_json:
        print_json(fields)
    else:
        from flows.display import print_row, print_rows

        examples = fields.pop("examples")
        print_row(fields)
        if examples:
            print_rows(examples, fold=("revision", "fault"))
    refuse_faults(report)


def progress(report: "Report") -> str:
    """Return what has been done so far."""
    done = f"{report.revisions:,} revisions, {report.bytes / (1 << 30):.2f} GiB, {report.moved:,} moved"
    return f"{report.operation}: {done}, {report.removed:,} segments removed"


def refuse_faults(report: "Report") -> None:
    """Raise `AdapterError` for damaged or unreadable revisions."""
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
