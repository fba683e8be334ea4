"""A manifest's files are written where a restore wants them, whoever wrote the manifest."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.backup.manifest import FORMAT, BackupManifest, StoredFile, publish, read
from engine.backup.place import BackupPlace
from engine.errors import ConfigError

MANIFEST = BackupManifest(FORMAT, "1", 1.0, "catalog", "0001", 1, "none", ())


def published(tmp_path: Path, name: str) -> BackupManifest:
    place = BackupPlace(str(tmp_path))
    return read(place, publish(place, replace(MANIFEST, files=(StoredFile(name, 0, ()),))).name)


@pytest.mark.parametrize(
    "name",
    [
        "state/../x", "../x", "/etc/passwd", "state", "state/", "other/x", "state//x", "state/./x",
        "state/a\0b", "", "store/../../x",
    ],
)  # fmt: skip
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="names the file"):
        published(tmp_path, name)


@pytest.mark.parametrize("name", ["state/catalog.db", "store/00/a b", "suites/my-sums/..x"])
def test_names_of_a_backups_own_files_are_not(tmp_path: Path, name: str) -> None:
    assert [file.name for file in published(tmp_path, name).files] == [name]
