"""Adapters from elsewhere become revisions of any family, with a probe that our base computes."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.adapters import revision
from engine.base.families import BaseShapes
from engine.catalog.catalog import Catalog, Revision
from engine.catalog.revisions import Revisions
from engine.errors import AdapterError, ConfigError, DamagedBytes, MissingBytes, NotFound
from engine.publishing import importing
from engine.publishing.foreign import inspect, publish
from engine.publishing.importing import directory_from_store
from engine.publishing.publish import stored_tensors
from engine.quality.probe import Probe, ProbeRow, from_json, gaps
from engine.settings.params import Params, load_params
from engine.settings.services import EngineConfig
from engine.store.segments import Store
from engine.training.service.probing import probe_by_base
from tests.helpers.command_line import graftwork
from tests.helpers.live import free_port
from tests.helpers.made_adapters import CONFIGS, canonical, shapes, write
from tests.helpers.parity import merge

FAMILIES = {"tiny-moe": "Qwen3-MoE", "tiny-mla": "DeepSeek-V3"}


@pytest.fixture(scope="module", params=FAMILIES)
def expert_base(request, tmp_path_factory) -> tuple[str, Path]:
    """A random base with experts, whose projections all have other shapes."""
    from engine.base.toys.build import build
    from engine.base.toys.recipes import RECIPES

    directory = tmp_path_factory.mktemp("bases") / request.param
    directory.mkdir()
    recipe = replace(RECIPES[request.param], expert_inner=96, steps=0, problems=2048)
    build(recipe, seed=1, directory=directory, progress=lambda step, steps, loss: None)
    return request.param, directory


@pytest.fixture
def no_peft(monkeypatch) -> None:
    """Publish without peft's proof, which tests/engine/publishing/test_peft_proof.py is about."""
    monkeypatch.setattr("engine.publishing.foreign.left_out_reason", lambda *_: "a test")


def settings_of(base: Path, state: Path) -> Params:
    return Params(state_dir=state, base={"name": str(base)}, trainer={"port": free_port()})


def small(base, **more) -> dict:
    """Make factors whose effect is some nats, not a flood."""
    return {
        key: tensor / tensor.shape[1] ** 0.5 * (0.5 if key.endswith("B") else 1.0)
        for key, tensor in canonical(base, share=True, **more).items()
    }


@pytest.mark.long
def test_an_adapter_from_elsewhere_becomes_a_revision_by_the_command(tiny_base, tmp_path):
    base = BaseShapes.read(tiny_base)
    tensors = small(base, ranks={module: 1 + i % 4 for i, module in enumerate(base.linear)})
    source = write(tmp_path / "source", tensors, "plain", base, 2.0)
    (tmp_path / "params.yaml").write_text(
        f"state_dir: state\nbase: {{name: {tiny_base}}}\ntrainer: {{port: {free_port()}}}"
    )
    runs = [
        command(tmp_path, "adapters", "import", str(source), *more) for more in ([], ["--policy", "afar"])
    ]
    (digest,) = {line.split()[1] for run in runs for line in run.splitlines() if "digest" in line}
    assert "layout          plain" in runs[0]
    assert "Nothing was imported" in runs[0]
    assert "loading the base" in runs[1]
    assert "peft computes the same within" in runs[1]
    assert f"imported as afar@{digest[:12]}" in runs[1]
    assert f"`graftwork serve --revision afar@{digest[:12]}`" in runs[1]
    params = load_params(tmp_path / "params.yaml")
    catalog = Catalog(params.paths.catalog_url)
    (row,) = catalog.revisions.page("afar")
    assert (row.digest, row.rank, row.state) == (digest, 4, "exported")
    catalog.close()
    stored, _ = revision.read_revision(directory_from_store(params, "afar", digest, tmp_path / "again"))
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[key], tensors[key]) for key in tensors)
    made = params.paths.revision("afar", digest)
    kept = made.with_name(f"{made.name}.original") / "adapter_model.safetensors"
    assert kept.read_bytes() == (source / "adapter_model.safetensors").read_bytes()
    probe = from_json(json.loads((made / "probe.json").read_text()))
    assert (probe.digest, len(probe.rows)) == (digest, 8)
    # The second route: transformers with B @ A written into the weights.
    assert max(gaps(merged(tiny_base, tensors, probe), [row.adapter for row in probe.rows])) < 1e-4
    assert max(gaps(merged(tiny_base, {}, probe), [row.base for row in probe.rows])) < 1e-4
    assert max(gaps([row.adapter for row in probe.rows], [row.base for row in probe.rows])) > 0.1


@pytest.mark.long
@pytest.mark.usefixtures("no_peft")
def test_an_import_as_json_and_into_a_name_that_was_purged(tiny_base, tmp_path):
    """A purged name is refused before the probe is computed, and taken again on purpose."""
    from tasks.purge import purge

    base = BaseShapes.read(tiny_base)
    source = write(tmp_path / "source", canonical(base), "plain", base, 2.0)
    (tmp_path / "params.yaml").write_text(
        f"state_dir: state\nbase: {{name: {tiny_base}}}\ntrainer: {{port: {free_port()}}}"
    )
    looked = json.loads(command(tmp_path, "adapters", "import", str(source), "--json"))
    assert (looked["found"]["layout"], looked["imported"]) == ("plain", None)
    given = ["adapters", "import", str(source), "--policy", "afar", "--json"]
    imported = json.loads(command(tmp_path, *given))
    name = f"afar@{imported['digest'][:12]}"
    assert (imported["imported"], imported["digest"]) == (name, looked["digest"])
    assert imported["peft"] == "The proof by peft is left out: a test."
    params = load_params(tmp_path / "params.yaml")
    purge(params, "afar", "ann", "asked for it", lambda place, counts: None)
    assert not list(tmp_path.glob("state/revisions/*"))
    with pytest.raises(AssertionError, match=r"purged by 'ann'.*--reuse-name"):
        command(tmp_path, *given)
    assert not list(tmp_path.glob("state/revisions/*"))
    assert json.loads(command(tmp_path, *given, "--reuse-name"))["imported"] == name


def command(folder, *arguments):
    run = graftwork(*arguments, "--params", str(folder / "params.yaml"))
    assert run.returncode == 0, run.stderr
    return run.stdout


def merged(base: Path, tensors: dict, probe: Probe) -> list[list[float]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    rows = []
    with torch.no_grad():
        merge(model, tensors)
        for row in probe.rows:
            ids = torch.tensor([row.tokens])
            found = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
            rows.append(found[:, 0].tolist())
    return rows


@pytest.mark.usefixtures("no_peft")
@pytest.mark.parametrize("layout", ["per-expert", "megatron-3d", "shared-outer"])
@pytest.mark.long
def test_adapters_of_experts_and_latent_attention_are_imported_with_a_probe(expert_base, tmp_path, layout):
    name, path = expert_base
    params, base = settings_of(path, tmp_path / "state"), BaseShapes.read(path)
    tensors = small(base, seed=3)
    source = write(tmp_path / "source", tensors, layout, base)
    foreign, info = inspect(params, source)
    assert (foreign.found.layout, foreign.found.family) == (layout, FAMILIES[name])
    said: list[str] = []
    made = publish(params, source, foreign, info, "afar", "ada", probe_by_base(params, info, said.append))
    assert len(said) == 1
    file = params.paths.revision("afar", made.digest) / "probe.json"
    probe = from_json(json.loads(file.read_text()))
    assert (probe.digest, probe.base_digest, probe.dtype) == (made.digest, info.digest, "float32")
    assert max(gaps([row.adapter for row in probe.rows], [row.base for row in probe.rows])) > 0.05
    assert max(gaps(merged(path, tensors, probe), [row.adapter for row in probe.rows])) < 1e-4
    stored, _ = revision.read_revision(directory_from_store(params, "afar", made.digest, tmp_path / "again"))
    assert all(torch.equal(stored[key], tensors[key]) for key in tensors)
    # Again, it is there already, and nobody computes.
    assert publish(params, source, foreign, info, "afar", "ada", refuse).digest == made.digest


def refuse(*_) -> Probe:
    raise AssertionError("asked for a probe")


ROWS = (ProbeRow((1, 2), (-1.0,), (-2.0,)),)


def one_row(manifest, directory) -> Probe:
    assert not json.loads((directory / "probe.json").read_text())
    return Probe(manifest.digest, manifest.base_digest, "float32", ROWS)


@pytest.mark.usefixtures("no_peft")
def test_a_revision_of_ours_keeps_its_probe(tiny_base, tmp_path):
    params, base = settings_of(tiny_base, tmp_path / "state"), BaseShapes.read(tiny_base)
    tensors = canonical(base)
    targets = tuple({key.rsplit(".", 2)[1] for key in tensors})
    (tmp_path / "a").mkdir()
    _, info = inspect(params, write(tmp_path / "a", tensors, "plain", base))
    settings = {"base_digest": info.digest, "rank": 2, "targets": targets, "step": 7}
    made = revision.make_manifest(tensors, policy="sums", **settings)
    shipped = json.loads(json.dumps(Probe(made.digest, info.digest, "float32", ROWS).to_json()))
    path = revision.write_revision(tmp_path / "sums", tensors, made, shipped)
    foreign, _ = inspect(params, path)
    assert publish(params, path, foreign, info, "sums", "local", refuse) == made
    kept = json.loads((params.paths.revision("sums", made.digest) / "probe.json").read_text())
    assert kept == shipped
    other = publish(params, path, foreign, info, "other", "local", one_row)
    assert other.digest == made.digest
    probe = json.loads((params.paths.revision("other", made.digest) / "probe.json").read_text())
    assert from_json(probe).rows == ROWS


@pytest.mark.usefixtures("no_peft")
def test_the_row_comes_last_so_that_a_crash_leaves_nothing_to_serve(tiny_base, tmp_path, monkeypatch):
    params, base = settings_of(tiny_base, tmp_path / "state"), BaseShapes.read(tiny_base)
    source = write(tmp_path / "source", canonical(base), "plain", base)
    foreign, info = inspect(params, source)

    def crash(self, rows, *_more) -> None:
        (row,) = rows
        assert (params.paths.revision("afar", row.digest) / "probe.json").is_file()
        raise KeyboardInterrupt

    monkeypatch.setattr(Revisions, "add_many", crash)
    with pytest.raises(KeyboardInterrupt):
        publish(params, source, foreign, info, "afar", "local", one_row)
    monkeypatch.undo()
    catalog = Catalog(params.paths.catalog_url)
    with pytest.raises(NotFound):
        catalog.revisions.get("afar", foreign.digest(info.digest))
    # Its directory and probe are there, so that the second time nobody computes.
    assert publish(params, source, foreign, info, "afar", "local", refuse)
    assert catalog.revisions.get("afar", foreign.digest(info.digest)).state == "exported"
    catalog.close()


@pytest.mark.usefixtures("no_peft")
def test_damaged_bytes_are_written_anew_by_the_next_import(tiny_base, tmp_path):
    """Whole bytes are left where they are; changed, cut off or missing ones come again elsewhere."""
    params, base = settings_of(tiny_base, tmp_path / "state"), BaseShapes.read(tiny_base)
    tensors = canonical(base)
    source = write(tmp_path / "source", tensors, "plain", base)
    foreign, info = inspect(params, source)
    made = publish(params, source, foreign, info, "afar", "local", one_row)
    catalog, store = Catalog(params.paths.catalog_url), Store(params.paths.store)

    def again() -> Revision:
        publish(params, source, foreign, info, "afar", "local", refuse)
        row = catalog.revisions.get("afar", made.digest)
        stored = stored_tensors(catalog, store, row)
        assert all(torch.equal(stored[key], tensors[key]) for key in tensors)
        return row

    first = again()
    assert again() == first
    assert len(list(store.segments())) == 1
    for harm in (flip, lambda path: os.truncate(path, 100), Path.unlink):
        before = catalog.revisions.get("afar", made.digest)
        harm(store.path(before.segment))
        with pytest.raises((DamagedBytes, MissingBytes), match=r"[Ee]xport (the revision )?again"):
            stored_tensors(catalog, store, before)
        moved = again()
        assert moved.segment != before.segment
        assert replace(moved, segment=first.segment) == first
    catalog.close()


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_what_the_engine_cannot_serve_is_refused_before_anything_is_written(tiny_base, tmp_path):
    params, base = settings_of(tiny_base, tmp_path / "state"), BaseShapes.read(tiny_base)
    wide = write(tmp_path / "wide", canonical(base, default=64), "plain", base)
    foreign, info = inspect(params, wide)
    with pytest.raises(AdapterError, match=r"rank 64.*Set `engine\.max_rank` to 64"):
        publish(params, wide, foreign, info, "afar", "local", refuse)
    with pytest.raises(ConfigError, match="'A Far'"):
        publish(params, wide, foreign, info, "A Far", "local", refuse)
    assert not (tmp_path / "state").exists()


def test_a_target_that_vllm_drops_on_cuda_is_refused_there_alone(tmp_path, monkeypatch):
    """Before its probe is computed: the engine would refuse it at its first request."""
    base = shapes("deepseek_v3")
    (tmp_path / "base").mkdir()
    config = {"model_type": "deepseek_v3", **CONFIGS["deepseek_v3"]}
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    params, tensors = settings_of(tmp_path / "base", tmp_path / "state"), canonical(base)
    kept = {key: tensor for key, tensor in tensors.items() if ".kv_b_proj." not in key}

    def check(tensors: dict) -> None:
        made = revision.make_manifest(
            tensors, policy="afar", base_digest="b", rank=2, targets=base.targets, step=0
        )
        importing.check_fit(params, tmp_path / "base", tensors, made, tmp_path)

    check(tensors)
    monkeypatch.setattr(importing, "cuda_bytes", lambda: 80 << 30)
    params = params.model_copy(update={"engine": EngineConfig(dtype="float32")})
    check(kept)
    with pytest.raises(AdapterError, match="target kv_b_proj"):
        check(tensors)
    assert set(base.targets_on(cuda=False)) - set(base.targets_on(cuda=True)) == {"kv_b_proj"}


@pytest.mark.usefixtures("no_peft")
def test_a_converted_adapter_keeps_what_it_was_read_from(tiny_base, tmp_path):
    """Another dtype and another scale: the digest is of what is served, the original stays beside it."""
    params, base = settings_of(tiny_base, tmp_path / "state"), BaseShapes.read(tiny_base)
    half = write(tmp_path / "half", canonical(base, dtype=torch.bfloat16), "plain", base, 4.0)
    foreign, info = inspect(params, half)
    assert {tensor.dtype for tensor in foreign.tensors.values()} == {torch.float32}
    made = publish(params, half, foreign, info, "afar", "local", one_row)
    path = params.paths.revision("afar", made.digest)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (path.with_name(f"{path.name}.original") / name).read_bytes() == (half / name).read_bytes()
    assert revision.read_revision(path, info.digest)[1] == made
    # One that was killed before it came to that does it when it is run again.
    shutil.rmtree(path.with_name(f"{path.name}.original"))
    assert publish(params, half, foreign, info, "afar", "local", refuse).digest == made.digest
    assert (path.with_name(f"{path.name}.original") / "adapter_config.json").is_file()
