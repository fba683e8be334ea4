"""The text digest: whatever beside config and weights changes an answer changes it, and is refused."""

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text

from engine.adapters.revision import make_manifest, targets_of, write_revision
from engine.base.families import BaseShapes
from engine.base.prompts import fix_template_date, prompt_text, tokenizer_of
from engine.base.resident import BaseInfo, ensure_base
from engine.catalog.catalog import Catalog, migrate, open_catalog
from engine.catalog.database import open_engine
from engine.errors import BaseModelError, ServiceError
from engine.publishing.foreign import inspect
from engine.publishing.importing import import_revision
from engine.serving import server
from engine.serving.vllm_plugin.plugin import register
from engine.settings.params import BaseConfig, Params
from engine.training.service.app import load_trainer
from tasks.score import on_base
from tasks.suites import Suite
from tests.helpers.catalog_migrations import upgrade_to
from tests.helpers.made_adapters import canonical

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
    changed("tokenizer_config.json", name_or_path="elsewhere")(base)
    (base / "README.md").write_text("A model.")
    assert info_of(base) == before


def test_a_catalog_of_the_version_before_takes_the_files_that_it_finds(
    base: Path, empty_catalog_url: str
) -> None:
    upgrade_to(empty_catalog_url, "0013")
    info = info_of(base)
    row = {"digest": info.digest, "name": "base", "path": "/elsewhere", "created_at": 1.0}
    with open_engine(empty_catalog_url).execution_options(write=True).begin() as connection:
        add = text(
            "INSERT INTO bases (digest, name, path, created_at) VALUES (:digest, :name, :path, :created_at)"
        )
        connection.execute(add, row)
    migrate(empty_catalog_url)
    with closing(Catalog(empty_catalog_url)) as catalog:
        assert catalog.bases.get(info.digest).text_files is None
        catalog.bases.check_text(info)
        catalog.bases.register(info)
        assert catalog.bases.get(info.digest).text_files == info.text_files


def test_other_files_are_refused_until_they_are_accepted(base: Path, catalog: Catalog) -> None:
    first = info_of(base)
    catalog.bases.register(first)
    CHANGES["template"](base)
    other = info_of(base)
    for refused in (catalog.bases.register, catalog.bases.check_text):
        with pytest.raises(BaseModelError, match=rf"chat_template\.jinja changed.*{other.text_digest[:12]}"):
            refused(other)
        with pytest.raises(BaseModelError):
            refused(other, first.text_digest)
    assert catalog.bases.accepted_text(first.digest) is None
    catalog.bases.check_text(other, other.text_digest[:12])
    assert catalog.bases.get(first.digest).text_files == first.text_files
    catalog.bases.register(other, other.text_digest[:12])
    assert catalog.bases.accepted_text(first.digest) == other.text_digest
    assert catalog.audit.newest_of("base.text") is not None
    with pytest.raises(BaseModelError):
        catalog.bases.register(first)


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
    started: Params, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "params.json"
    file.write_text(started.model_dump_json())
    monkeypatch.setattr(sys, "argv", ["server", "--params", str(file)])
    for name in ("serve", "set_environment", "preload_libgomp"):
        monkeypatch.setattr(server, name, lambda *_: None)
    for start in (server.main, lambda: load_trainer(started)):
        with pytest.raises(BaseModelError, match=r"chat_template\.jinja"):
            start()


def test_a_revision_of_other_files_is_not_imported(started: Params, base: Path, tmp_path: Path) -> None:
    trained = ensure_base(started.base, started.paths)
    tensors = canonical(BaseShapes.read(base))
    manifest = make_manifest(
        tensors, policy="sums", base_digest=trained.digest, rank=2, targets=targets_of(tensors), step=1,
        text_digest="e" * 64,
    )  # fmt: skip
    made = write_revision(tmp_path / "made", tensors, manifest, {})
    for refused in (import_revision, inspect):
        with pytest.raises(BaseModelError, match="text digest e"):
            refused(started, made)
    accepted = settings_of(base, trained.text_digest)
    assert import_revision(accepted, made).digest == manifest.digest
    assert inspect(accepted, made)[0].rank == 2


def test_scores_of_other_files_are_not_compared(started: Params, base: Path) -> None:
    suite = Suite("sums", "3", "addition", {}, "d", base, ())
    other = ensure_base(started.base, started.paths)
    assert on_base(started, suite, other.digest, "any") == suite
    with open_catalog(started.paths) as catalog:
        catalog.bases.register(other, other.text_digest)
    assert on_base(started, suite, other.digest, other.text_digest).version == f"3+{other.text_digest[:12]}"
    with pytest.raises(ServiceError, match="Restart"):
        on_base(started, suite, other.digest, "f" * 64)


def test_a_template_with_todays_date_renders_alike_every_day(base: Path) -> None:
    CHANGES["template"](base)
    tokenizer = tokenizer_of(base)
    assert prompt_text(tokenizer, "2 + 3") == "26 Jul 2024: 2 + 3"
    # As vLLM renders it in its own process.
    messages = [{"role": "user", "content": "2 + 3"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "26 Jul 2024: 2 + 3"
    assert fix_template_date.__name__ in register.__code__.co_names
