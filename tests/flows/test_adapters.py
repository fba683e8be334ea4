"""`graftwork adapters`: names and what they may have meant, pages, lineage, export, retire."""

import errno
import json
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from engine.adapters import packed, revision
from engine.catalog.catalog import Catalog, Release
from engine.catalog.records import served_name
from engine.errors import AdapterError, ConfigError, Conflict, NotFound, ServiceError
from engine.publishing import maintenance
from engine.settings.params import Params, load_params
from engine.store.open import open_store
from flows.cli import app
from tasks import adapters
from tests.helpers.kept_adapters import BASE, add_policy, bare, keep, settings
from tests.helpers.measured_work import peak_of_pages
from tests.helpers.own_process import in_own_process
from tests.helpers.packed_files import read_packed


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return settings(tmp_path)


@pytest.fixture
def params(file: Path) -> Params:
    return load_params(file)


@pytest.fixture
def catalog(params: Params) -> Catalog:
    return add_policy(params, "sums", "sorting")


def ask(file: Path, *arguments: str):
    """Run `graftwork adapters ...`; raise what it ended with."""
    found = CliRunner().invoke(app, ["adapters", *arguments, "--params", str(file)])
    if found.exception and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.output


def test_a_policy_that_an_import_made_is_released_without_a_score_alone(file, catalog):
    """It is known to the catalog, not to the settings. No services run here."""

    def release(policy: str, *options: str):
        return CliRunner().invoke(app, ["release", policy, *options, "--params", str(file)]).exception

    assert "--skip-score" in str(release("sums"))
    assert isinstance(release("sums", "--skip-score", "made with peft"), ServiceError)
    assert "no policy 'ghost'" in str(release("ghost", "--skip-score", "made with peft"))


def asked(file: Path, *arguments: str):
    return json.loads(ask(file, *arguments, "--json"))


@pytest.mark.parametrize("name", ["sums", "sums@", "sums@3f9", "Sums@3f9c", "sums@xyz1", "@3f9c", "a b@3f9c"])
@pytest.mark.parametrize("command", ["show", "retire"])
def test_what_is_no_name_is_said_to_be_none(file, catalog, command, name):
    with pytest.raises(ConfigError, match="POLICY@DIGEST") as error:
        ask(file, command, name, *(["--reason", "x"] if command == "retire" else []))
    assert error.value.exit_code == 2


def test_an_unknown_digest_names_the_nearest_and_a_short_one_its_candidates(file, catalog):
    digests = ["aaaa1" + "0" * 59, "aaaa2" + "0" * 59, "bbbb1" + "0" * 59]
    catalog.revisions.add_many([bare("sums", i, digest=digest) for i, digest in enumerate(digests)])
    with pytest.raises(NotFound, match="sums@aaaa1") as unknown:
        ask(file, "show", "sums@aaaa9")
    assert unknown.value.exit_code == 5
    assert {served_name("sums", digest) for digest in digests[:2]} <= set(unknown.value.nearest)
    with pytest.raises(Conflict, match=r"sums@aaaa1.*sums@aaaa2") as many:
        ask(file, "show", "sums@aaaa")
    assert many.value.exit_code == 6
    with pytest.raises(NotFound, match="sums"):
        ask(file, "ls", "sumz")
    assert asked(file, "show", "sums@bbbb")["digest"] == digests[2]


def test_nothing_to_show_where_nothing_was_started(file):
    with pytest.raises(NotFound, match="no catalog"):
        ask(file, "ls")


def test_a_list_goes_on_after_a_name_and_ends(file, catalog):
    rows = [bare("sums", number) for number in range(7)] + [bare("sorting", 8, owner="you")]
    catalog.revisions.add_many(rows)
    newest = [served_name("sums", row.digest) for row in reversed(rows[:7])]
    seen: list[str] = []
    after: list[str] = []
    while True:
        page = asked(file, "ls", "sums", "--limit", "3", *after)
        seen += [row["name"] for row in page["revisions"]]
        if page["next"] is None:
            break
        after = ["--after", page["next"]]
    assert seen == newest
    every = asked(file, "ls", "--limit", "0")
    assert {row["name"] for row in every["revisions"]} == {
        served_name(row.policy, row.digest) for row in rows
    }
    assert [row["name"] for row in asked(file, "ls", "--owner", "you")["revisions"]] == [
        served_name("sorting", rows[-1].digest)
    ]
    assert asked(file, "ls", "sorting", "--owner", "me") == {"revisions": [], "next": None}
    shown = ask(file, "ls", "sums", "--limit", "2")
    assert newest[0] in shown
    assert f"--after {newest[1]}" in shown
    assert ask(file, "ls", "sorting", "--owner", "me") == "None.\n"
    with pytest.raises(ConfigError, match=r"--after.*sorting"):
        ask(file, "ls", "sorting", "--after", newest[0])


@pytest.mark.long
def test_many_rows_never_lie_in_memory(params, catalog):
    for start in range(0, 30_000, 10_000):
        catalog.revisions.add_many([bare("sums", number) for number in range(start, start + 10_000)])
    for policy in ("sums", None):
        peak = in_own_process(peak_of_pages, params.paths.catalog_url, policy, 30_000)
        # A page of 500 rows; all of them would be over 30 MB.
        assert peak < 8 << 20, peak


def test_show_says_roles_tombstone_and_where_the_bytes_are(file, params, catalog):
    (row,) = keep(params, catalog, "sums", [3], exported=True)
    catalog.revisions.set_probe("sums", row.digest, {"accepted": True, "reason": "It reproduces."})
    found = asked(file, "show", served_name("sums", row.digest))
    assert (found["segment"], found["rank"], found["roles"]) == (row.segment, 2, [])
    assert found["directory"] == str(params.paths.revision("sums", row.digest))
    catalog.tombstones.add("sums", row.digest, "It answers in French.", "me")
    assert "It answers in French." in ask(file, "show", served_name("sums", row.digest))


def grow(catalog: Catalog) -> dict[str, str]:
    """A line of five, one of which has two children: a - b - (c - d, e). Return names by letter."""
    parents = {"a": None, "b": "a", "c": "b", "d": "c", "e": "b"}
    digests = {letter: letter * 4 + "0" * 60 for letter in parents}
    rows = [
        bare("sums", i, digest=digests[letter], parent=digests[parent] if parent else None)
        for i, (letter, parent) in enumerate(parents.items())
    ]
    catalog.revisions.add_many(rows)
    return {letter: served_name("sums", digest) for letter, digest in digests.items()}


def test_lineage_is_a_tree_with_parents_above_and_children_below(file, catalog):
    names = grow(catalog)
    found = asked(file, "show", names["b"])
    assert [(row["depth"], row["name"]) for row in found["lineage"]] == [
        (-1, names["a"]), (0, names["b"]), (1, names["c"]), (2, names["d"]), (1, names["e"]),
    ]  # fmt: skip
    assert not found["more"]
    lines = [line for line in ask(file, "show", names["c"]).splitlines() if line.lstrip().startswith("sums@")]
    assert [len(line) - len(line.lstrip()) for line in lines] == [0, 2, 4, 6]
    assert lines[2].endswith("<-")


def test_a_lineage_of_many_is_cut_and_says_so(catalog):
    root, first = "f" * 64, bare("sums", 0, digest="f" * 64)
    catalog.revisions.add_many([first] + [bare("sums", i, parent=root) for i in range(1, 31)])
    leaves, more = adapters.lineage(catalog, first, limit=10)
    assert more
    assert len(leaves) <= 12
    leaves, more = adapters.lineage(catalog, first)
    assert not more
    assert len(leaves) == 31


def test_an_exported_directory_is_the_revision(file, params, catalog, tmp_path):
    """From the directory that is kept here with its settings and probe, else from the packed bytes."""
    kept, bare_one = (keep(params, catalog, "sums", [seed], exported=seed == 1)[0] for seed in (1, 2))
    for row, config in ((kept, {"seed": 1}), (bare_one, {})):
        target = tmp_path / row.digest[:6]
        ask(file, "export", served_name("sums", row.digest), str(target))
        _, manifest = revision.read_revision(target, BASE)
        assert (manifest.digest, manifest.config) == (row.digest, config)
        assert (json.loads((target / "probe.json").read_text()) != {}) is bool(config)
        assert json.loads((target / "adapter_config.json").read_text())["r"] == 2
        with pytest.raises(Conflict, match="exists already"):
            ask(file, "export", served_name("sums", row.digest), str(target))
        assert revision.read_revision(target, BASE)[1] == manifest
    # Somebody's file among the kept ones does not become an export.
    damaged = params.paths.revision("sums", kept.digest) / "adapter_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-8])
    ask(file, "export", served_name("sums", kept.digest), str(tmp_path / "again"))
    assert revision.read_revision(tmp_path / "again", BASE)[1].digest == kept.digest


def test_the_packed_file_is_whole_and_opens_anywhere(file, params, catalog, tmp_path):
    from safetensors import safe_open

    (row,) = keep(params, catalog, "sums", [5])
    target = tmp_path / "packed.safetensors"
    said = asked(file, "export", served_name("sums", row.digest), str(target), "--packed")
    assert said["path"] == str(target)
    whole = read_packed(target)
    tensors = packed.unpack(whole)
    assert revision.digest(tensors, 2, revision_targets(tensors), BASE) == row.digest
    with safe_open(target, "pt") as opened:
        assert opened.metadata()["digest"] == row.digest
    with pytest.raises(Conflict, match="is not overwritten"):
        ask(file, "export", served_name("sums", row.digest), str(target), "--packed")
    assert torch.equal(read_packed(target).payload, whole.payload)


def revision_targets(tensors) -> list[str]:
    return sorted({key.rpartition(".lora_")[0].rpartition(".")[2] for key in tensors})


@pytest.mark.parametrize("packed_file", [True, False])
def test_an_export_that_fails_leaves_nothing(file, params, catalog, tmp_path, monkeypatch, packed_file):
    (row,) = keep(params, catalog, "sums", [5])
    name, target = served_name("sums", row.digest), tmp_path / "out"
    arguments = ["export", name, str(target), *(["--packed"] if packed_file else [])]

    def is_full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = sorted(path.name for path in tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(packed if packed_file else revision, "write_file" if packed_file else "sync", is_full)
        with pytest.raises(ServiceError, match="No space left"):
            ask(file, *arguments)
    with pytest.raises(NotFound, match="no directory"):
        ask(file, "export", name, str(tmp_path / "no" / "where"))
    segment = params.paths.store / row.segment
    data = bytearray(segment.read_bytes())
    data[row.offset + 3] ^= 1
    segment.write_bytes(data)
    with pytest.raises(AdapterError, match="damaged"):
        ask(file, *arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_retired_revision_is_listed_on_request_and_served_again_when_taken_back(file, catalog):
    catalog.revisions.add_many([bare("sums", 1), bare("sums", 2)])
    first, second = (served_name("sums", bare("sums", i).digest) for i in (1, 2))
    ask(file, "retire", first, "--reason", "superseded", "--by", "ann")
    row = asked(file, "show", first)
    assert (row["retired_by"], row["retired_reason"]) == ("ann", "superseded")
    assert [row["name"] for row in asked(file, "ls", "sums")["revisions"]] == [second]
    both = asked(file, "ls", "sums", "--retired")["revisions"]
    assert {row["name"]: row["state"] for row in both} == {first: "retired", second: "exported"}
    ask(file, "retire", first, "--off", "--reason", "needed after all")
    assert len(asked(file, "ls", "sums")["revisions"]) == 2
    with pytest.raises(ConfigError, match="Give a reason"):
        ask(file, "retire", second, "--reason", " ")
    with pytest.raises(NotFound):
        ask(file, "retire", "sums@dddd", "--reason", "x")


def test_what_is_retired_already_or_is_not_retired_is_said(file, catalog):
    catalog.revisions.add_many([bare("sums", 1)])
    name = served_name("sums", bare("sums", 1).digest)
    said = asked(file, "retire", name, "--off", "--reason", "x")
    assert said["done"] == f"{name} was not retired; nothing has changed."
    assert "by" not in said
    ask(file, "retire", name, "--reason", "superseded.", "--by", "ann")
    again = asked(file, "retire", name, "--reason", "another", "--by", "bob")
    assert again["done"] == f"{name} was retired already, by ann: superseded."
    assert (again["by"], again["reason"]) == ("ann", "superseded.")


def test_a_list_that_is_refused_prints_nothing(file, catalog):
    said = CliRunner().invoke(app, ["adapters", "ls", "sumz", "--json", "--params", str(file)])
    assert isinstance(said.exception, NotFound)
    assert said.output == ""


@pytest.mark.parametrize("damage", ["{", "[1]"])
def test_a_damaged_probe_is_a_sentence(file, params, catalog, tmp_path, damage):
    (row,) = keep(params, catalog, "sums", [6], exported=True)
    probe = params.paths.revision("sums", row.digest) / revision.PROBE
    probe.write_text(damage)
    target = tmp_path / "out"
    with pytest.raises(AdapterError, match=r"probe.*damaged"):
        ask(file, "export", served_name("sums", row.digest), str(target))
    assert not target.exists()
    probe.unlink()
    ask(file, "export", served_name("sums", row.digest), str(target))
    assert target.is_dir()


def test_a_packed_export_finds_bytes_that_moved_meanwhile(params, catalog, tmp_path):
    (row,) = keep(params, catalog, "sums", [7])
    with closing(open_store(params)) as store:
        maintenance.compact(catalog, store, everything=True)
    assert not (params.paths.store / row.segment).exists()
    assert adapters.export(params, catalog, row, tmp_path / "whole", packed=True).is_file()


def test_one_that_users_are_served_is_not_retired(file, catalog):
    row = bare("sums", 1)
    catalog.revisions.add_many([row])
    catalog.releases.add(
        Release("r1", "sums", row.digest, None, "probe", 0.2, "running", {"alpha": 0.05}, 1.0, 1.0)
    )
    with pytest.raises(Conflict, match="running release"):
        ask(file, "retire", served_name("sums", row.digest), "--reason", "x")
    assert asked(file, "show", served_name("sums", row.digest))["retired_at"] is None


def test_expiry_is_a_time_from_now_or_never(file, catalog):
    catalog.revisions.add_many([bare("sums", 1)])
    name = served_name("sums", bare("sums", 1).digest)
    before = time.time()
    at = asked(file, "retire", name, "--in", "30d")["expires_at"]
    assert before + 30 * 86_400 <= at <= time.time() + 30 * 86_400
    assert asked(file, "show", name)["expires_at"] == at
    ask(file, "retire", name, "--never")
    assert asked(file, "show", name)["expires_at"] is None
    for wrong in (
        ["--in", "30"],
        ["--in", "-3d"],
        ["--in", "0s"],
        ["--in", "999999999w"],
        ["--in", "tomorrow"],
    ):
        with pytest.raises(ConfigError, match="duration"):
            ask(file, "retire", name, *wrong)
    with pytest.raises(ConfigError, match="Give one of"):
        ask(file, "retire", name, "--in", "3d", "--never")
    assert asked(file, "show", name)["retired_at"] is None
