"""`graftwork backup`: keep an installation, restore it, and move its catalog."""

import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from engine.errors import Conflict, MissingBytes
from flows.cli.store import KEEP
from flows.entry import PARAMS, Json, ParamsFile, enter, now_and_then, print_json

if TYPE_CHECKING:
    from engine.backup.writer import BackupWriter

app = typer.Typer()
backup_app = typer.Typer(help="Back up an installation, restore it, move its catalog.", no_args_is_help=True)
app.add_typer(backup_app, name="backup", rich_help_panel=KEEP)
Address = Annotated[str, typer.Argument(help="sqlite:///FILE or postgresql://USER@HOST/NAME.")]


@backup_app.command("create")
def create(
    place: Annotated[
        str, typer.Argument(metavar="DIR|URL", help="Directory, or URL such as s3://bucket/backups.")
    ],
    keep: Annotated[
        int | None, typer.Option(min=1, help="Keep this many backups there, the newest. Default: all.")
    ] = None,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Back up the whole installation while it runs; a later backup to the same place copies what is new.

    Credentials are not in it.
    """
    settings = enter(params)
    from tasks.backup import backup

    began, said = time.monotonic(), now_and_then()

    def on_file(writer: "BackupWriter") -> None:
        said(lambda: f"{len(writer.files):,} files, {_size(writer.size)}, of which {_size(writer.new)} new")

    report = asdict(backup(settings, place, keep, on_file)) | {"seconds": round(time.monotonic() - began, 3)}
    if as_json:
        print_json(report)
    else:
        typer.echo(
            f"Backup {report['name']} in {report['place']}: {report['files']:,} files, "
            f"{_size(report['bytes'])}, of which {_size(report['new_bytes'])} new, in "
            f"{report['seconds']:.1f} s. Backups there: {report['kept']}."
        )
        typer.echo(f"MLflow's database: {report['mlflow']}.")
        typer.echo(
            f"Its manifest's digest (sha256): {report['digest']}. Keep it elsewhere: `graftwork backup "
            "restore --expect` checks it."
        )
    if lost := report["missing"]:
        raise MissingBytes(
            f"The backup is finished, but {len(lost)} segments that the catalog names are not in the store, "
            f"and so not in the backup ({', '.join(lost[:3])}). `graftwork store verify` names the revisions."
            " No older backup was removed, since it may have them."
        )


@backup_app.command("restore")
def restore(
    place: Annotated[
        str,
        typer.Argument(
            metavar="DIR|URL", help="The newest backup there is restored; or DIR/backups/NAME.json."
        ),
    ],
    expect: Annotated[
        str | None,
        typer.Option(
            metavar="DIGEST",
            help="Refuse a backup unless its manifest has this digest, whole or its first 12 digits or more.",
        ),
    ] = None,
    compare_with: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|DIR|URL",
            help="List what is undone since the backup, by the replaced installation's catalog.db, state "
            "directory or catalog URL.",
        ),
    ] = None,
    revoke_all_keys: Annotated[
        bool, typer.Option("--revoke-all-keys", help="Let no key of the backup work.")
    ] = False,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Restore a backup into the settings' empty state directory.

    What was decided since it was made is undone, which is said first.
    """
    settings = enter(params)
    from tasks.restore_backup import restore_backup

    began, said = time.monotonic(), now_and_then()

    def on_bytes(done: int, size: int) -> None:
        said(lambda: f"{_size(done)} of {_size(size)}")

    restored = restore_backup(
        settings,
        place,
        on_bytes,
        expect=expect,
        compare_with=compare_with,
        revoke_all_keys=revoke_all_keys,
        tell=partial(typer.echo, err=True),
    )
    if as_json:
        seconds = round(time.monotonic() - began, 3)
        return print_json(asdict(restored) | {"state_dir": str(restored.state_dir), "seconds": seconds})
    typer.echo(
        f"{restored.name} is restored to {restored.state_dir}: {restored.files:,} files, "
        f"{_size(restored.bytes)}, in {time.monotonic() - began:.1f} s. MLflow's database: {restored.mlflow}."
    )
    if restored.revoked is not None:
        typer.echo(
            f"All keys are revoked: {restored.revoked:,}. `graftwork key ls` lists them with their tenants; "
            "make each tenant a new one with `graftwork key create TENANT`."
        )
    typer.echo("Start it with `graftwork up`, which makes new credentials.")


@backup_app.command("copy-catalog")
def copy_catalog(source: Address, target: Address, as_json: Json = False) -> None:
    """Copy all rows of a catalog into an empty database, SQLite or Postgres. Run `graftwork down` first."""
    from engine.catalog.catalog import Catalog
    from engine.catalog.copying import copy_catalog as copy_rows
    from engine.controller.route_changes import controller_serves

    with Catalog(source) as source_catalog:
        if controller_serves(source_catalog):
            raise Conflict(
                f"A controller runs on {source_catalog.label}: what it changes from now on would not be in "
                "the copy. Nothing was changed. Run `graftwork down`, then copy again."
            )
    began, said = time.monotonic(), now_and_then()

    def on_rows(table: str, rows: int) -> None:
        said(lambda: f"{table}: {rows:,} rows")

    counts = copy_rows(source, target, on_rows)
    seconds = round(time.monotonic() - began, 3)
    if as_json:
        return print_json({"rows": counts, "seconds": seconds})
    typer.echo(
        f"{sum(counts.values()):,} rows are copied in {seconds:.1f} s, {counts['revisions']:,} revisions "
        "among them. Set `catalog.url` to the copy's address, then `graftwork up`."
    )


def _size(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"
