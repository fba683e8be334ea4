"""`graftwork backup`, `restore --from` and `catalog copy`: keep an installation, and move it."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from engine.errors import Conflict, MissingBytes
from flows.entry import PARAMS, Json, ParamsFile, enter

if TYPE_CHECKING:
    from engine.backup.writer import BackupWriter

app = typer.Typer()
catalog_app = typer.Typer(help="Move the catalog between SQLite and Postgres.", no_args_is_help=True)
app.add_typer(catalog_app, name="catalog")
SAID_EVERY_S = 5.0
Address = Annotated[str, typer.Argument(help="sqlite:///FILE or postgresql://USER@HOST/NAME.")]


@app.command()
def backup(
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
    from tasks.backup import backup as back_up

    began, said = time.monotonic(), _progress()

    def on_file(writer: "BackupWriter") -> None:
        said(lambda: f"{len(writer.files):,} files, {_size(writer.size)}, of which {_size(writer.new)} new")

    found = asdict(back_up(settings, place, keep, on_file)) | {"seconds": round(time.monotonic() - began, 3)}
    if as_json:
        typer.echo(json.dumps(found))
    else:
        typer.echo(
            f"Backup {found['name']} in {found['place']}: {found['files']:,} files, "
            f"{_size(found['bytes'])}, of which {_size(found['new_bytes'])} new, in "
            f"{found['seconds']:.1f} s. Backups there: {found['kept']}."
        )
        typer.echo(f"MLflow's database: {found['mlflow']}.")
        typer.echo(
            f"Its manifest's digest (sha256): {found['digest']}. Keep it elsewhere: `graftwork restore "
            "--expect` checks it."
        )
    if lost := found["missing"]:
        raise MissingBytes(
            f"The backup is finished, but {len(lost)} segments that the catalog names are not in the store, "
            f"and so not in the backup ({', '.join(lost[:3])}). `graftwork store verify` names the revisions."
        )


def restore_from(
    place: str, params: ParamsFile, expect: str | None, compare_with: str | None, revoke_all_keys: bool
) -> None:
    """Restore a backup into the settings' empty state directory, and say first what that undoes."""
    settings = enter(params)
    from tasks.restore_backup import restore_backup

    began, said = time.monotonic(), _progress()

    def on_bytes(done: int, size: int) -> None:
        said(lambda: f"{_size(done)} of {_size(size)}")

    def tell(sentence: str) -> None:
        typer.echo(sentence, err=True)

    found = restore_backup(
        settings,
        place,
        on_bytes,
        expect=expect,
        compare_with=compare_with,
        revoke_all_keys=revoke_all_keys,
        tell=tell,
    )
    typer.echo(
        f"{found.name} is restored to {found.state_dir}: {found.files:,} files, {_size(found.bytes)}, in "
        f"{time.monotonic() - began:.1f} s. MLflow's database: {found.mlflow}."
    )
    if found.revoked is not None:
        typer.echo(
            f"All keys are revoked: {found.revoked:,}. `graftwork key ls` lists them with their tenants; "
            "make each tenant a new one with `graftwork key create TENANT`."
        )
    typer.echo("Start it with `graftwork up`, which makes new credentials.")


@catalog_app.command("copy")
def copy(source: Address, target: Address, as_json: Json = False) -> None:
    """Copy all rows of a catalog into an empty database, SQLite or Postgres. Run `graftwork down` first."""
    from engine.catalog.catalog import Catalog
    from engine.catalog.copying import copy_catalog
    from engine.controller.route_changes import controller_serves

    with Catalog(source) as found:
        if controller_serves(found):
            raise Conflict(
                f"A controller runs on {found.label}: what it changes from now on would not be in the copy. "
                "Nothing was changed. Run `graftwork down`, then copy again."
            )
    began, said = time.monotonic(), _progress()

    def on_rows(table: str, rows: int) -> None:
        said(lambda: f"{table}: {rows:,} rows")

    counts = copy_catalog(source, target, on_rows)
    seconds = round(time.monotonic() - began, 3)
    if as_json:
        return typer.echo(json.dumps({"rows": counts, "seconds": seconds}))
    typer.echo(
        f"{sum(counts.values()):,} rows are copied in {seconds:.1f} s, {counts['revisions']:,} revisions "
        "among them. Set `catalog.url` to the copy's address, then `graftwork up`."
    )


def _progress() -> Callable[[Callable[[], str]], None]:
    """Return a function that prints a line to stderr, at most every `SAID_EVERY_S` seconds."""
    said = time.monotonic()

    def say(line: Callable[[], str]) -> None:
        nonlocal said
        if time.monotonic() - said >= SAID_EVERY_S:
            said = time.monotonic()
            print(line(), file=sys.stderr, flush=True)

    return say


def _size(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"
