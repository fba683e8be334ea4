"""The files and services of DVC's stages.

A stage's services use free ports and a state directory inside the checkout, which is removed when the stage
succeeds, so parallel experiments do not interfere.
"""

import json
import shutil
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.base.resident import ensure_base, made_path
from engine.errors import BaseModelError, NotFound
from engine.services import lifecycle as services
from engine.settings.params import Params, load_params
from tasks.suites import ITEMS, Suite, load_suite

Report = Callable[[str, str], None]


class Files:
    """The paths that the stages of one checkout read and write; `root` has the settings file."""

    def __init__(self, root: Path):
        self.root = root
        outputs = root / "repro"
        self.base = outputs / "base"
        self.policy = outputs / "policy"
        self.suite = outputs / "suite"
        self.engine = outputs / "engine.json"
        self.adapt = outputs / "adapt"
        self.revision = outputs / "revision"
        self.report = outputs / "report"
        self.services = outputs / "services"
        # An experiment runs in a copy at CHECKOUT/.dvc/tmp/exps/NAME.
        above = [parent.parent for parent in root.parents if parent.name == ".dvc"]
        self.home = above[-1] if above else root


def files_of(params: Params) -> Files:
    """Return the stages' paths beside the settings file."""
    assert params.source, "stages run on a file of settings"
    return Files(params.source.parent)


def opened_suite(files: Files) -> Suite:
    """Open and verify the suite in `suite/`; raises `NotFound` when the stage `suites` has not run."""
    names = [path.parent.name for path in files.suite.glob(f"*/{ITEMS}")]
    if not names:
        raise NotFound(f"There is no suite in {files.suite}. Run `dvc repro`: its stage `suites` writes it.")
    return load_suite(names[0], files.suite)


def home_params(params: Params) -> Params:
    """Return the checkout's settings: an experiment's copy does not have its state directory."""
    assert params.source, "stages run on a file of settings"
    return load_params(files_of(params).home / params.source.name)


@contextmanager
def own_services(
    params: Params,
    name: str,
    only: Collection[str],
    report: Report,
    prepare: Callable[[Params], object] = lambda stage: None,
) -> Iterator[tuple[Params, str]]:
    """Run the services `only` in a state directory that is removed when the block succeeds.

    Gives their settings and local key; `prepare` is called before they start.
    """
    from engine.catalog.opening import open_catalog

    with resident(params, name) as stage:
        with open_catalog(stage.paths, migrated=True) as catalog:
            key = catalog.keys.ensure_local(stage.paths.local_key)
        prepare(stage)
        with services.session(stage, lambda: None, report, only):
            yield stage, key


@contextmanager
def resident(params: Params, name: str) -> Iterator[Params]:
    """Give settings with free ports, the base of stage `base`, and a state directory of their own.

    The directory is removed when the block succeeds. Raises `BaseModelError` when the base has changed.
    """
    files = files_of(params)
    known = read_json(files.base / "base.json", "base")
    state = files.services / name
    state.mkdir(parents=True, exist_ok=True)
    # One thread by default, so that sums do not depend on the number of cores.
    engine = {"port": _free_port(), "threads": params.engine.threads or 1}
    trainer = {"port": _free_port(), "threads": params.trainer.threads or 1}
    stage = params.model_copy(
        update={
            "state_dir": state,
            "engine": params.engine.model_copy(update=engine),
            "trainer": params.trainer.model_copy(update=trainer),
        }
    )
    _link_base(stage, files)
    base = ensure_base(stage.base, stage.paths)
    if (base.digest, base.text_digest) != (known["digest"], known.get("text_digest", base.text_digest)):
        raise BaseModelError(
            f"The base {params.base.name!r} has changed since the stage `base`. Run `dvc repro -f -s base`."
        )
    yield stage
    shutil.rmtree(state)


def _link_base(stage: Params, files: Files) -> None:
    """Link a base that was made here into a stage's state directory."""
    if link := made_path(stage.base, stage.paths):
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(files.base)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def renew(directory: Path) -> None:
    """Replace a directory by an empty one."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON with sorted keys, so that equal values give equal bytes."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def read_json(path: Path, stage: str) -> dict[str, Any]:
    """Read a JSON file that `stage` writes; raises `NotFound` when there is none."""
    if not path.is_file():
        raise NotFound(f"There is no {path}. Run `dvc repro`: its stage `{stage}` writes it.")
    return dict(json.loads(path.read_text()))
