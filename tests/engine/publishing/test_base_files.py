"""What an adapter says of its base: another name is a warning where people look, a foreign token an error."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from engine.adapters.revision import read_manifest
from engine.base.families import BaseShapes
from engine.base.resident import BaseInfo
from engine.catalog.opening import open_catalog
from engine.errors import AdapterError, BaseModelError
from engine.publishing.base_files import read_claims
from engine.publishing.foreign import inspect, publish
from engine.publishing.importing import import_revision
from engine.quality.probe import Probe, ProbeRow
from engine.report.collect import with_claim
from engine.report.data import RevisionRow
from engine.report.why import gather
from engine.settings.params import Params
from tasks import flavor, version_page
from tasks.adapters import described, find
from tests.helpers.made_adapters import canonical, write

OTHER = "Qwen/Qwen3-8B"


@pytest.fixture(scope="module")
def info(tiny_base) -> BaseInfo:
    return BaseInfo("tiny-dense", tiny_base, "d" * 64)


@pytest.mark.parametrize(
    "named",
    ["", "tiny-dense", "graftwork/Tiny-Dense", "/data/bases/tiny", "C:\\models\\tiny-dense",
     "/root/.cache/huggingface/hub/models--graftwork--tiny-dense/snapshots/" + "a" * 40],
)  # fmt: skip
def test_a_name_of_the_base_is_no_warning(tmp_path, info, named):
    assert read_claims(tmp_path, named, info).notes == ()


@pytest.mark.parametrize("named", [OTHER, "tiny-dense-2", "unsloth/tiny-dense-bnb-4bit", "/data/other"])
def test_another_name_is_a_warning_with_both(tmp_path, info, named):
    claims = read_claims(tmp_path, named, info)
    assert claims.other_base == named
    (note,) = claims.notes
    assert f"the base {named}; it is served on tiny-dense" in note


def test_copies_of_the_bases_own_files_are_ignored_and_said_once(tiny_base, tmp_path, info):
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in names:
        shutil.copy(tiny_base / name, tmp_path / name)
    # Another tool's spelling of the same tokens.
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()), indent=7))
    (note,) = read_claims(tmp_path, "", info).notes
    assert all(note.count(name) == 1 for name in names)


def added(directory: Path, base: Path) -> None:
    (directory / "added_tokens.json").write_text('{"<|tool|>": 999999}')


def renumbered(directory: Path, base: Path) -> None:
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = sorted(vocabulary)[:2]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))


def decoded(directory: Path, base: Path) -> None:
    config = {"added_tokens_decoder": {"151665": {"content": "<|PAD_TOKEN|>"}}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "words"), [(added, "999999"), (renumbered, "tokenizer.json"), (decoded, "PAD_TOKEN.*151665")]
)
def test_tokens_that_the_base_does_not_have_are_refused(tiny_base, tmp_path, info, change, words):
    change(tmp_path, tiny_base)
    with pytest.raises(AdapterError, match=f"{words}.*tiny-dense does not have"):
        read_claims(tmp_path, "", info)


def test_another_chat_template_is_a_warning(tmp_path, info):
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert "chat template" in read_claims(tmp_path, "", info).warnings[0]


@pytest.mark.parametrize("content", ["{", "[" * 10_000])
def test_a_damaged_token_file_is_refused(tmp_path, info, content):
    (tmp_path / "added_tokens.json").write_text(content)
    with pytest.raises(AdapterError, match="not JSON"):
        read_claims(tmp_path, "", info)


def test_another_bases_name_is_in_manifest_catalog_registry_and_report(tiny_base, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.publishing.foreign.left_out_reason", lambda *_: "a test")
    params, shapes = (
        Params(state_dir=tmp_path / "state", base={"name": str(tiny_base)}),
        BaseShapes.read(tiny_base),
    )
    source = write(tmp_path / "source", canonical(shapes), "plain", shapes)
    config = source / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": OTHER}))
    foreign, base = inspect(params, source)
    assert foreign.claims.other_base == OTHER

    def probe(manifest, directory) -> Probe:
        return Probe(manifest.digest, manifest.base_digest, "float32", (ProbeRow((1, 2), (-1.0,), (-2.0,)),))

    digest = publish(params, source, foreign, base, "afar", "local", probe).digest
    directory = params.paths.revision("afar", digest)
    told = read_manifest(directory).config["import"]
    assert told == {
        "named_base": OTHER, "base_name": base.name, "peft": "The proof by peft is left out: a test."
    }  # fmt: skip
    with open_catalog(params.paths) as catalog:
        assert described(params, catalog, find(catalog, f"afar@{digest[:12]}"))["imported"] == told
        assert catalog.policies.get("afar").config == {"import": told}
    tags = flavor.describe(read_manifest(directory))
    assert (tags["named_base"], tags["base_name"]) == (OTHER, base.name)
    registry = Mock(search_model_versions=Mock(return_value=[]))
    page = version_page.page(params, registry, gather(params, "afar", digest))
    assert f"It was made for the base {OTHER}." in page
    row = RevisionRow("afar", digest, None, 0, 2, 8, 0.0)
    assert with_claim(row, params.paths.revisions).named_base == OTHER
    # A manifest of another base stays an error.
    shutil.copytree(directory, tmp_path / "moved")
    manifest = json.loads((tmp_path / "moved/manifest.json").read_text())
    (tmp_path / "moved/manifest.json").write_text(json.dumps(manifest | {"base_digest": "e" * 64}))
    with pytest.raises(BaseModelError, match="belongs to the base"):
        import_revision(params, tmp_path / "moved")
