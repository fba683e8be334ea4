"""Files that are replaced whole: what a reader sees, what a failure leaves, what is forced to the disk."""

import os
import threading
from pathlib import Path

import pytest

from engine import files
from engine.files import replacing, write_once, write_whole


def test_a_file_is_the_old_one_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    write_whole(path, "old")
    with replacing(path) as draft:
        draft.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["note.json"]


def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    write_whole(path, b"old")
    with pytest.raises(UnicodeEncodeError), replacing(path) as draft:
        draft.write_text("half" + "\ud800")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["note.json"]


def test_a_durable_one_is_forced_to_the_disk_before_it_has_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "note.json", []
    monkeypatch.setattr(files, "sync", lambda what: synced.append((what.name, path.exists())))
    write_whole(path, "one")
    assert synced == []
    path.unlink()
    write_whole(path, "two", durable=True)
    (draft, was_there), directory = synced
    assert (draft.startswith("note.json."), was_there) == (True, False)
    assert directory == (tmp_path.name, True)


def test_two_writers_of_one_file_never_mix(tmp_path: Path) -> None:
    path, texts = tmp_path / "note", [letter * 100_000 for letter in "ab"]
    writers = [threading.Thread(target=lambda text=text: [write_whole(path, text) for _ in range(50)])
               for text in texts]  # fmt: skip
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            seen.add(path.read_text())
    assert seen | {path.read_text()} <= set(texts)
    assert os.listdir(tmp_path) == ["note"]


@pytest.mark.parametrize("links", [True, False])
def test_of_two_writers_of_one_small_file_the_first_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    path, link = tmp_path / "id", os.link

    def late(draft: Path, target: Path) -> None:
        """Let the other one write between the look at the file and the link."""
        monkeypatch.setattr(os, "link", link if links else refuse)
        assert write_once(path, "theirs") == "theirs"
        os.link(draft, target)

    def refuse(draft: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", late)
    assert write_once(path, "ours") == "theirs"
    assert write_once(path, "ours") == path.read_text() == "theirs"
    assert os.listdir(tmp_path) == ["id"]


def test_a_small_file_that_a_kill_left_empty_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "id").touch()
    with pytest.raises(OSError, match="it is empty"):
        write_once(tmp_path / "id", "ours")
