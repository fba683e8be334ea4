"""The ledger as Parquet in a directory and behind S3: read by any DuckDB, whole or retried, after purges."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from fsspec.core import url_to_fs

from engine.backup import ledger_archive
from engine.backup.ledger_archive import Archiver, archive, read_state
from engine.backup.place import BackupPlace
from engine.catalog.catalog import migrate
from engine.errors import ConfigError, ServiceError
from engine.ledger.ledger import Ledger
from engine.ledger.purge import of_policy, purge
from engine.ledger.spool import Spool
from engine.settings.params import Params
from tests.helpers.command_line import graftwork

DAY = 86_400.0
# Ten seconds before the end of a day, UTC.
LATE = 20_000 * DAY - 10


class Kept:
    """A ledger with its snapshot."""

    def __init__(self, root: Path):
        self.root = root
        self.ledger = Ledger(root / "ledger.duckdb")
        self.snapshot = root / "ledger.snapshot.duckdb"

    def add(self, *rows: tuple[str, str, float], table: str = "observations") -> None:
        spool = Spool(self.root / "spool", "test")
        for id, policy, at in rows:
            spool.emit(table, id=id, policy=policy, at=at)
        spool.close()
        self.ledger.ingest(self.root / "spool")
        self.ledger.snapshot(self.snapshot)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path)
    kept.add(("a", "sums", LATE), ("b", "sums", LATE + 20), ("c", "others", LATE + 21))
    yield kept
    kept.ledger.close()


@pytest.fixture(params=["directory", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "directory":
        return str(tmp_path / "archive")
    request.getfixturevalue("s3")
    from s3fs import S3FileSystem

    bucket = f"b{time.time_ns()}"
    S3FileSystem().mkdir(bucket)
    return f"s3://{bucket}/deep"


def names(place: BackupPlace) -> list[str]:
    files, root = url_to_fs(place.address, use_listings_cache=False)
    found = files.find(f"{root}/ledger")
    return sorted(name.partition("/ledger/")[2] for name in found)


def read_all(place: BackupPlace, table: str, folder: Path) -> list[tuple[Any, ...]]:
    """Read a table's files with a DuckDB that knows nothing else."""
    for name in names(place):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(place.read(f"ledger/{name}"))
    files = f"read_parquet('{folder}/{table}/*/*.parquet', hive_partitioning = true)"
    return (
        duckdb.connect()
        .execute(f'SELECT id, policy, "at", CAST(day AS VARCHAR) FROM {files} ORDER BY id')
        .fetchall()
    )


@pytest.mark.long
def test_each_day_is_a_file_for_any_duckdb(kept: Kept, address: str, tmp_path: Path) -> None:
    place = BackupPlace(address)
    done = archive(kept.snapshot, place, "one")
    assert (done.written, done.removed, done.files, done.rows) == (2, 0, 2, 3)
    assert names(place) == [
        "observations/day=2024-10-03/rows.parquet",
        "observations/day=2024-10-04/rows.parquet",
    ]
    assert done.newest_day == "2024-10-04"
    assert read_all(place, "observations", tmp_path / "read") == [
        ("a", "sums", LATE, "2024-10-03"),
        ("b", "sums", LATE + 20, "2024-10-04"),
        ("c", "others", LATE + 21, "2024-10-04"),
    ]


def test_only_what_changed_is_written_again(kept: Kept, address: str, tmp_path: Path) -> None:
    place = BackupPlace(address)
    archive(kept.snapshot, place, "one")
    assert archive(kept.snapshot, place, "one").written == 0
    # A late event of a closed day, and a row of another table.
    kept.add(("d", "sums", LATE - 5))
    kept.add(("e", "sums", LATE), table="verdicts")
    done = archive(kept.snapshot, place, "one")
    assert (done.written, done.files, done.rows) == (2, 3, 5)
    assert [row[0] for row in read_all(place, "observations", tmp_path / "read")] == ["a", "b", "c", "d"]


def test_purged_rows_leave_the_archive(kept: Kept, address: str, tmp_path: Path) -> None:
    place = BackupPlace(address)
    archive(kept.snapshot, place, "one")
    purge(kept.ledger, kept.root / "spool", kept.snapshot, of_policy(kept.ledger.path, "sums"))
    done = archive(kept.snapshot, place, "one")
    assert (done.written, done.removed, done.rows) == (1, 1, 1)
    assert [row[0] for row in read_all(place, "observations", tmp_path / "read")] == ["c"]


def test_a_failed_upload_is_retried_and_loses_nothing(
    kept: Kept, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, whole = BackupPlace(address), BackupPlace.write
    state, told = tmp_path / "state.json", list[str | None]()
    archiver = Archiver(kept.snapshot, place, "one", state, told.append)
    written: list[str] = []

    def failing(self: BackupPlace, name: str, data: bytes) -> None:
        written.append(name)
        if len(written) == 3:
            raise ServiceError("The bucket is gone.")
        whole(self, name, data)

    monkeypatch.setattr(BackupPlace, "write", failing)
    with pytest.raises(ServiceError, match="bucket"):
        archiver.turn()
    assert told == ["The bucket is gone."]
    assert read_state(state)["error"] == "The bucket is gone."
    # Whatever is there is whole, and the rest follows.
    assert len(read_all(place, "observations", tmp_path / "part")) in (1, 2)
    archiver.turn()
    assert told[-1] is None
    assert len(read_all(place, "observations", tmp_path / "read")) == 3
    found = read_state(state)
    assert (found["rows"], found["files"], found["error"]) == (3, 2, None)
    kept.add(("d", "sums", LATE - 5))
    written[:] = ["", ""]
    with pytest.raises(ServiceError):
        archiver.turn()
    # The last success stays to be seen.
    assert read_state(state)["rows"] == 3
    assert read_state(state)["error"]


def test_the_archive_of_another_installation_is_left_alone(kept: Kept, address: str) -> None:
    place = BackupPlace(address)
    archive(kept.snapshot, place, "one")
    with pytest.raises(ConfigError, match="another installation"):
        archive(kept.snapshot, place, "two")
    place.write("manifest.json", json.dumps({"format": 99}).encode())
    with pytest.raises(ConfigError, match="newer version"):
        archive(kept.snapshot, place, "one")


def test_a_place_that_is_no_directory_is_named(kept: Kept, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ServiceError, match=r"ledger's archive.*/file/deep"):
        archive(kept.snapshot, BackupPlace(str(tmp_path / "file" / "deep"), "The ledger's archive"), "one")


@pytest.mark.parametrize("wrong", ["relative/dir", "s3:/bucket", "", "s3://bucket?x=1"])
def test_a_wrong_place_is_refused_by_the_settings(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"controller\.archive"):
        Params.model_validate({"controller": {"archive": wrong}})


def test_the_command_shows_the_archive(kept: Kept, tmp_path: Path) -> None:
    root, file = tmp_path / "state", tmp_path / "params.yaml"
    params = Params(state_dir=root)
    migrate(params.paths.catalog_url)
    file.write_text(json.dumps({"state_dir": str(root)}))
    assert "controller.archive" in graftwork("ledger", "--params", str(file)).stdout
    told = graftwork("ledger", "archive", "--params", str(file))
    assert told.returncode == 2
    assert "Set controller.archive" in told.stderr
    place = tmp_path / "archive"
    file.write_text(json.dumps({"state_dir": str(root), "controller": {"archive": str(place)}}))
    assert "Nothing is archived" in graftwork("ledger", "--params", str(file)).stdout
    kept.ledger.touch()
    kept.ledger.snapshot(params.paths.ledger_snapshot)
    shown = graftwork("ledger", "archive", "--params", str(file)).stdout
    assert f"3 rows in 2 files at {place}, up to 2024-10-04, complete at" in shown
    found = json.loads(graftwork("ledger", "--json", "--params", str(file)).stdout)
    assert (found["rows"], found["files"], found["error"]) == (3, 2, None)


def test_the_archive_reads_what_its_own_query_wrote(kept: Kept) -> None:
    """The days of names and of rows are one expression."""
    with duckdb.connect() as database:
        query = f'SELECT {ledger_archive.DAY} FROM (SELECT ? AS "at")'
        for at, day in ((0.0, "1970-01-01"), (LATE, "2024-10-03"), (LATE + 9.9996, "2024-10-03")):
            assert database.execute(query, [at]).fetchone() == (day,)
