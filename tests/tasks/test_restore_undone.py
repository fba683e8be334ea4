"""What a restore undoes is said before it happens, exchanged backups are refused, and old keys can end."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.backup import manifest as manifests
from engine.backup.manifest import find, read
from engine.catalog.audit import Audit
from engine.catalog.opening import open_catalog, whole_catalog
from engine.catalog.purges import Purges
from engine.errors import ConfigError, Conflict, NotFound, ServiceError
from engine.settings.params import Params, load_params
from tasks import backup as backing
from tasks import erase as erasing
from tasks.backup import backup
from tasks.restore_backup import restore_backup
from tasks.restore_undone import NAMED
from tests.helpers.command_line import graftwork
from tests.helpers.kept_adapters import add_policy, keep, settings


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing, "HANDED_OVER_S", 0.0)
    monkeypatch.setattr(erasing, "HANDED_OVER_S", 0.0)
    monkeypatch.setattr(erasing, "REVOKED_S", 0.0)


class Kept(NamedTuple):
    """An installation and its backup: `stays` and `ends` are keys, of `acme` and of `umbrella`."""

    params: Params
    place: Path
    digest: str
    revision: str
    stays: str
    ends: str


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    params = machine(tmp_path, "here")
    with add_policy(params, "north", "south") as catalog:
        (row,) = keep(params, catalog, "north", [1])
        stays, ends = catalog.keys.create("acme", "user"), catalog.keys.create("umbrella", "user")
        catalog.keys.create("passed", "user", expires_at=1.0)
        catalog.keys.ensure_local(params.paths.local_key)
    place = tmp_path / "kept"
    return Kept(params, place, backup(params, str(place)).digest, row.digest, stays, ends)


def machine(tmp_path: Path, name: str) -> Params:
    (tmp_path / name).mkdir()
    return load_params(settings(tmp_path / name))


def decide(kept: Kept) -> str:
    """End everything that a restore of the backup brings back; return the id of the key that was revoked."""
    with open_catalog(kept.params.paths) as catalog:
        catalog.tombstones.add("north", kept.revision, "worse", "ada")
        # Of a revision that the backup does not have.
        (later,) = keep(kept.params, catalog, "north", [2])
        catalog.tombstones.add("north", later.digest, "worse", "ada")
        catalog.purges.run("south", "ada", 5.0)
        key = catalog.keys.match(kept.ends)[0].id
        # Not in the backup either.
        catalog.keys.revoke(catalog.keys.create("late", "user"))
    erasing.erase(kept.params, "umbrella", "ada", "asked for it", lambda place, counts: None)
    return key


class Told:
    """Collects what is told; nothing may be written beside the state directory at that time."""

    def __init__(self, there: Params):
        self.lines: list[str] = []
        self._root = there.state_dir.parent

    def __call__(self, line: str) -> None:
        assert [path.name for path in self._root.iterdir()] == ["params.yaml"]
        self.lines.append(line)


@pytest.mark.parametrize("named_by", ["state directory", "file", "URL"])
def test_what_comes_back_is_told_by_name_before_anything_is_written(
    kept: Kept, tmp_path: Path, named_by: str
) -> None:
    key = decide(kept)
    # The state directory is moved away, as for a restore in its place.
    gone = kept.params.state_dir.rename(tmp_path / "gone")
    present = {
        "state directory": str(gone), "file": str(gone / "catalog.db"), "URL": f"sqlite:///{gone}/catalog.db"
    }  # fmt: skip
    there = machine(tmp_path, "there")
    told = Told(there)
    restore_backup(there, str(kept.place), compare_with=present[named_by], tell=told)
    general, compared, *kinds = told.lines
    assert "valid again, unless you give --revoke-all-keys" in general
    assert str(gone / "catalog.db") in compared
    assert [line.partition(": ")[2] for line in kinds] == [
        f"1 ({key} of umbrella).", f"1 (north@{kept.revision[:12]}).", "1 (south).", "1 (umbrella)."
    ]  # fmt: skip
    with open_catalog(there.paths) as catalog:
        # As was said.
        assert catalog.keys.find(kept.ends)
        assert catalog.tombstones.find("north", kept.revision) is None
        assert catalog.policies.get("south")


def test_nothing_is_listed_where_nothing_was_decided(kept: Kept, tmp_path: Path) -> None:
    there = machine(tmp_path, "there")
    told = Told(there)
    restore_backup(there, str(kept.place), compare_with=str(kept.params.state_dir), tell=told)
    assert told.lines[2:] == ["  No revoked key, tombstone, purged policy or erased tenant is undone."]
    other = machine(tmp_path, "other")
    told = Told(other)
    restore_backup(other, str(kept.place), tell=told)
    # Without a catalog that knows, the option is named.
    assert (len(told.lines), "--compare-with" in told.lines[1]) == (2, True)


def test_of_many_the_first_are_named_and_all_are_counted(tmp_path: Path) -> None:
    params = machine(tmp_path, "here")
    with add_policy(params, "north") as catalog:
        made = [catalog.keys.create("acme", "user") for _ in range(NAMED + 3)]
        backup(params, str(tmp_path / "kept"))
        for key in made:
            catalog.keys.revoke(key)
    there = machine(tmp_path, "there")
    told = Told(there)
    restore_backup(there, str(tmp_path / "kept"), compare_with=str(params.state_dir), tell=told)
    (line,) = told.lines[2:]
    assert (f": {NAMED + 3} (" in line, line.count(" of acme"), "and 3 more" in line) == (True, NAMED, True)


def test_the_settings_own_catalog_tells_before_the_refusal(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, lines = decide(kept), list[str]()
    with pytest.raises(Conflict, match="is not empty"):
        restore_backup(kept.params, str(kept.place), tell=lines.append)
    assert any(f"{key} of umbrella" in line for line in lines)
    # A comparison that fails does not hide the refusal.
    monkeypatch.setattr(Purges, "marks", lambda self: (_ for _ in ()).throw(NotFound("It is broken.")))
    with pytest.raises(Conflict, match="is not empty"):
        restore_backup(kept.params, str(kept.place), tell=lines.append)
    assert lines[-1].endswith("is not known: It is broken.")


def test_a_catalog_that_cannot_know_is_refused(kept: Kept, tmp_path: Path) -> None:
    other, there = machine(tmp_path, "other"), machine(tmp_path, "there")
    add_policy(other, "north").close()
    told = Told(there)
    with pytest.raises(ConfigError, match="another installation"):
        restore_backup(there, str(kept.place), compare_with=str(other.state_dir), tell=told)
    with pytest.raises(NotFound, match=r"catalog\.db"):
        restore_backup(there, str(kept.place), compare_with=str(tmp_path / "nowhere"), tell=told)
    told("Nothing was written.")


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_no_key_of_the_backup_works_where_all_are_revoked(
    kept: Kept, tmp_path: Path, is_elsewhere: bool
) -> None:
    there = machine(tmp_path, "there")
    if is_elsewhere:
        url = f"sqlite:///{tmp_path / 'elsewhere.db'}"
        there = load_params(there.state_dir.parent / "params.yaml", catalog={"url": url})
    told = Told(there)
    found = restore_backup(there, str(kept.place), revoke_all_keys=True, tell=told)
    assert "as --revoke-all-keys says" in told.lines[0]
    local = kept.params.paths.local_key.read_text().strip()
    with whole_catalog(there.paths.catalog_url) as catalog:
        # The one that had expired too, as clocks may be set back.
        assert [key.revoked_at is None for key in catalog.keys.all()] == [False] * 4
        assert [catalog.keys.find(key) for key in (kept.stays, kept.ends, local)] == [None] * 3
        noted = Audit(catalog.access).all_of(["key.revoke"])
        assert {entry.subject for entry in noted} == {key.id for key in catalog.keys.all()}
        assert (found.revoked, len(noted)) == (4, 4)
        Audit(catalog.access).verify()
        # The installation's own is made anew, and others may be.
        assert catalog.keys.find(catalog.keys.ensure_local(there.paths.local_key))
        assert catalog.keys.find(catalog.keys.create("acme", "user"))


def test_a_restore_that_was_cut_off_goes_on_with_the_same_keys_alone(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = machine(tmp_path, "there").state_dir.parent / "params.yaml"
    there = load_params(file, catalog={"url": f"sqlite:///{tmp_path / 'elsewhere.db'}"})
    rename = Path.rename

    def cut_off(self: Path, target: Path) -> Path:
        if target == there.state_dir:
            raise OSError(5, "cut off")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", cut_off)
        with pytest.raises(ServiceError, match="cut off"):
            restore_backup(there, str(kept.place), revoke_all_keys=True)
    # The rows are in the catalog already, and with keys in force they would be others.
    with pytest.raises(Conflict, match="is not empty"):
        restore_backup(there, str(kept.place))
    assert restore_backup(there, str(kept.place), revoke_all_keys=True).revoked == 4
    with whole_catalog(there.paths.catalog_url) as catalog:
        assert catalog.keys.find(kept.stays) is None


def test_a_backup_that_was_exchanged_is_refused_before_anything_is_written(
    kept: Kept, tmp_path: Path
) -> None:
    place, name = find(str(kept.place))
    file = kept.place / "backups" / name
    assert kept.digest == hashlib.sha256(file.read_bytes()).hexdigest()
    with open_catalog(kept.params.paths) as catalog:
        noted = Audit(catalog.access).newest_of("backup")
    assert noted
    assert json.loads(noted.after)["digest"] == kept.digest
    # Somebody who can write to the place gives each file a name that fits.
    made = read(place, name)
    files = tuple(one for one in made.files if not one.name.startswith("store/"))
    file.unlink()
    exchanged = manifests.publish(place, replace(made, files=files))
    there = machine(tmp_path, "there")
    told = Told(there)
    for digest in (kept.digest, kept.digest[:12]):
        with pytest.raises(Conflict, match=exchanged.digest):
            restore_backup(there, str(kept.place), expect=digest, tell=told)
    for wrong in (exchanged.digest[:11], f"{exchanged.digest}0", "x" * 12, ""):
        with pytest.raises(ConfigError, match="first 12"):
            restore_backup(there, str(kept.place), expect=wrong, tell=told)
    assert told.lines == []
    told("Nothing was written.")
    restore_backup(there, str(kept.place), expect=exchanged.digest[:12].upper())
    assert there.state_dir.is_dir()


def test_the_commands_print_the_digest_check_it_and_say_what_is_undone(kept: Kept, tmp_path: Path) -> None:
    there = str(machine(tmp_path, "there").state_dir.parent / "params.yaml")
    own, place = str(kept.params.state_dir.parent / "params.yaml"), str(kept.place)
    digest = json.loads(graftwork("backup", "create", place, "--json", "--params", own).stdout)["digest"]
    wrong = graftwork("backup", "restore", place, "--expect", kept.digest, "--params", there)
    assert (wrong.returncode, digest in wrong.stderr) == (Conflict.exit_code, True)
    assert not load_params(there).state_dir.exists()
    said = graftwork(
        "backup", "restore", place, "--expect", digest, "--compare-with", str(kept.params.state_dir),
        "--revoke-all-keys", "--params", there,
    )  # fmt: skip
    assert (said.returncode, "A restore undoes" in said.stderr) == (0, True), said.stderr
    assert "All keys are revoked: 4." in said.stdout
    assert "graftwork key create TENANT" in said.stdout
    said = graftwork("backup", "create", place, "--params", own)
    _, name = find(place)
    assert hashlib.sha256((kept.place / "backups" / name).read_bytes()).hexdigest() in said.stdout
