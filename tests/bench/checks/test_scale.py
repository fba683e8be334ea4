"""Two engines of one catalog with Postgres, S3 and HAProxy: kills, releases and stops, in full."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from engine.settings.params import Params
from tests.helpers.bench_files import load

pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.timeout(1800)]
# Not what a busy machine decides: the share of throughput.
NAMES = ("promotion", "unloadable", "rollback", "faults", "kills", "sigterm", "failover")


@pytest.fixture(scope="module")
def bench(tiny_base: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ModuleType, Any, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        scale = load("scale", patch)
        root = tmp_path_factory.mktemp("scale")
        given = Params.model_validate({"state_dir": str(root), "base": {"name": str(tiny_base)}})
        with scale.cluster(given, root) as site, scale.Crowd(site.key) as crowd:
            yield scale, site, crowd


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_is_within_its_bound(bench: tuple[ModuleType, Any, Any], name: str) -> None:
    scale, site, crowd = bench
    figures = scale.record.Figures()
    scale.take(figures, scale.scenarios(site, crowd, 1)[name]())
    scale.take(figures, scale.observations(site, crowd))
    assert scale.record.sentences(figures, scale.BOUNDS, "missed") == []
