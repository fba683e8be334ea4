"""The text digest: whatever beside config and weights changes an answer changes it, and is refused."""

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from transformers.utils import chat_template_utils
from vllm.renderers.hf import safe_apply_chat_template

from engine.adapters.revision import make_manifest, targets_of, write_revision
from engine.base.families import BaseShapes
from engine.base.prompts import prompt_text, tokenizer_of
from engine.base.resident import BaseInfo, ensure_base
from engine.base.text_files import changed_files, text_files
from engine.catalog.access import open_engine
from engine.catalog.audit import Audit
from engine.catalog.catalog import Catalog, migrate, text_digests
from engine.catalog.opening import open_catalog
from engine.errors import BaseModelError, ServiceError
from engine.publishing.foreign import inspect
from engine.publishing.importing import import_revision
from engine.serving import server
from engine.serving.vllm_plugin.plugin import register
from engine.settings.params import BaseConfig, Params
from engine.settings.policies import PolicyConfig
from engine.training.run import prepare
from engine.training.service.app import load_trainer
from tasks.score import on_base
from tasks.suites import Suite
from tests.helpers.made_adapters import canonical
from tests.helpers.state_of_265b009 import leave_catalog_of_265b009

TODAYS = (
    "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}: {{ messages[0].content }}"
)


@pytest.fixture
def base(tiny_base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_base, tmp_path / "base"))


def info_of(base: Path, **settings: str) -> BaseInfo:
    return ensure_base(BaseConfig(name=str(base), **settings), Params(state_dir=base.parent / "state").paths)


def changed(file: str, **values: object) -> Callable[[Path], object]:
    def change(base: Path) -> None:
        path = base / file
        known = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(known | values, indent=4))

    return change


CHANGES = {
    "template": lambda base: (base / "chat_template.jinja").write_text(TODAYS),
    "template of another name": lambda base: (base / "chat_template.json").write_text("{}"),
    "end token": changed("generation_config.json", eos_token_id=7),
    "penalty": changed("generation_config.json", repetition_penalty=1.3),
    "tokenizer's setting": changed("tokenizer_config.json", add_bos_token=True),
    "tokenizer": changed("tokenizer.json", normalizer={"type": "Lowercase"}),
    "token": changed("added_tokens.json", new=999),
    "no generation defaults": lambda base: (base / "generation_config.json").unlink(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_an_answer_changes_the_text_digest_alone(
    base: Path, change: Callable[[Path], object]
) -> None:
    before = info_of(base)
    change(base)
    after = info_of(base)
    assert after.digest == before.digest
    assert after.text_digest != before.text_digest


def test_who_saved_the_files_does_not_matter(base: Path) -> None:
    before = info_of(base)
    changed("generation_config.json", transformers_version="99.0")(base)
    changed("tokenizer_config.json", name_or_path="elsewhere", is_local=True)(base)
    (base / "README.md").write_text("A model.")
    assert info_of(base) == before


@pytest.mark.parametrize("raw", ["", "[1]", "{"])
def test_broken_settings_are_a_change_too(base: Path, raw: str) -> None:
    before = text_files(base)
    (base / "generation_config.json").write_text(raw)
    assert changed_files(before, text_files(base)) == ["generation_config.json"]


def test_a_catalog_of_the_version_before_takes_the_files_that_it_finds(
    base: Path, empty_catalog_url: str
) -> None:
    leave_catalog_of_265b009(empty_catalog_url)
    info = info_of(base)
    row = {"digest": info.digest, "name": "base", "path": "/elsewhere", "created_at": 1.0}
    with open_engine(empty_catalog_url).execution_options(write=True).begin() as connection:
        add = text(
            "INSERT INTO bases (digest, name, path, created_at) VALUES (:digest, :name, :path, :created_at)"
        )
        connection.execute(add, row)
    migrate(empty_catalog_url)
    with closing(Catalog(empty_catalog_url)) as catalog:
        assert catalog.bases.get(info.digest).texts == []
        catalog.bases.check_text(info)
        catalog.bases.register(info)
        assert catalog.bases.get(info.digest).texts == [info.text_files]


def test_other_files_are_refused_until_they_are_accepted(base: Path, catalog: Catalog) -> None:
    first = info_of(base)
    catalog.bases.register(first)
    CHANGES["template"](base)
    other = info_of(base)
    for refused in (catalog.bases.register, catalog.bases.check_text):
        with pytest.raises(BaseModelError, match=rf"chat_template\.jinja changed.*{other.text_digest[:12]}"):
            refused(other)
    with pytest.raises(BaseModelError):
        catalog.bases.register(other, first.text_digest)
    assert catalog.bases.get(first.digest).texts == [first.text_files]
    assert Audit(catalog.access).newest_of("base.text") is None
    for _ in range(2):
        catalog.bases.register(other, other.text_digest[:12])
    catalog.bases.check_text(other)
    assert catalog.bases.get(first.digest).texts == [first.text_files, other.text_files]
    assert Audit(catalog.access).newest_of("base.text") is not None
    with pytest.raises(BaseModelError):
        catalog.bases.check_text(first)


def settings_of(base: Path, text_digest: str | None = None) -> Params:
    named = {"name": str(base), "text_digest": text_digest}
    return Params.model_validate({"state_dir": base.parent / "state", "base": named})


@pytest.fixture
def started(base: Path) -> Params:
    """Settings of an installation that knows its base, whose template has changed since."""
    params = settings_of(base)
    with open_catalog(params.paths, migrated=True) as catalog:
        catalog.bases.register(info_of(base))
    CHANGES["template"](base)
    return params


def test_neither_service_starts_on_other_files(
    started: Params, base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "params.json"
    file.write_text(started.model_dump_json())
    monkeypatch.setattr(sys, "argv", ["server", "--params", str(file)])
    for name in ("serve", "set_environment", "preload_libgomp"):
        monkeypatch.setattr(server, name, lambda *_: None)
    for start in (server.main, lambda: load_trainer(started)):
        with pytest.raises(BaseModelError, match=r"chat_template\.jinja"):
            start()
    # Nor does a run train on them beside services that have the first.
    with pytest.raises(BaseModelError, match=r"chat_template\.jinja"):
        prepare(started, "sums", PolicyConfig(task="addition", suite="s"), "key")
    accepted = settings_of(base, info_of(base).text_digest[:12])
    file.write_text(accepted.model_dump_json())
    server.main()
    assert text_digests(accepted.paths, info_of(base).digest)[1:] == [info_of(base).text_digest]


def test_a_revision_of_other_files_is_not_imported(started: Params, base: Path, tmp_path: Path) -> None:
    here = ensure_base(started.base, started.paths)
    (first,) = text_digests(started.paths, here.digest)
    tensors = canonical(BaseShapes.read(base))

    def made(text_digest: str | None, base_digest: str = here.digest) -> Path:
        manifest = make_manifest(
            tensors, policy="sums", base_digest=base_digest, rank=2, targets=targets_of(tensors), step=1,
            text_digest=text_digest,
        )  # fmt: skip
        return write_revision(tmp_path / f"made-{text_digest}-{base_digest[:4]}", tensors, manifest, {})

    for refused in (import_revision, inspect):
        with pytest.raises(BaseModelError, match="text digest e"):
            refused(started, made("e" * 64))
        with pytest.raises(BaseModelError, match="belongs to the base"):
            refused(started, made(None, "b" * 64))
    with pytest.raises(BaseModelError, match="chat_template"):
        import_revision(started, made(first))
    assert not started.paths.revisions.exists()
    accepted = settings_of(base, here.text_digest)
    for known in (first, here.text_digest, None):
        assert import_revision(accepted, made(known)).rank == 2
        assert inspect(accepted, made(known))[0].rank == 2
    with pytest.raises(BaseModelError, match="text digest e"):
        import_revision(accepted, made("e" * 64))
    # Another tool's file of this name says nothing.
    source = made(None)
    (source / "manifest.json").write_text('{"tool": "x"}')
    assert inspect(accepted, source)[0].rank == 2


def test_scores_of_other_files_are_not_compared(started: Params, base: Path) -> None:
    suite, other = Suite("sums", "3", "addition", {}, "d", base, ()), info_of(base)
    (first,) = text_digests(started.paths, other.digest)
    assert on_base(started, suite, other.digest, first) == suite
    assert on_base(started, suite, other.digest, None) == suite
    with pytest.raises(ServiceError, match="Restart"):
        on_base(started, suite, other.digest, other.text_digest)
    with open_catalog(started.paths) as catalog:
        catalog.bases.register(other, other.text_digest)
    assert on_base(started, suite, other.digest, other.text_digest).version == f"3+{other.text_digest[:12]}"
    with pytest.raises(ServiceError, match="Restart"):
        on_base(started, suite, other.digest, first)


def test_a_template_with_todays_date_renders_alike_every_day(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CHANGES["template"](base)
    tokenizer, messages = tokenizer_of(base), [{"role": "user", "content": "2 + 3"}]
    assert prompt_text(tokenizer, "2 + 3") == "26 Jul 2024: 2 + 3"
    # As vLLM's process, which has its own tokenizer and our plugin.
    monkeypatch.setattr(chat_template_utils, "datetime", datetime)
    settings: dict[str, Any] = {"chat_template": TODAYS, "tokenize": False}
    render = partial(safe_apply_chat_template, None, tokenizer, messages, **settings)
    assert render() != "26 Jul 2024: 2 + 3"
    register()
    assert render() == "26 Jul 2024: 2 + 3"
