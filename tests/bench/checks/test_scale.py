"""Two engines of one catalog with Postgres, S3 and HAProxy: an upgrade, releases, kills; in full."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from engine.settings.params import Params
from tests.helpers.bench_files import load

pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.timeout(1800)]
# Not what a busy machine decides: the share of throughput.
NAMES = ("releases", "rollback", "kills", "rollouts", "failover", "sigterm")


@pytest.fixture(scope="module")
def bench(
    tiny_base: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ModuleType, Any, Any, list[str]]]:
    with pytest.MonkeyPatch.context() as patch:
        scale = load("scale", patch)
        root = tmp_path_factory.mktemp("scale")
        given = Params.model_validate({"state_dir": str(root), "base": {"name": str(tiny_base)}})
        with scale.cluster(given, root, is_old=True) as site, scale.Crowd(site.key) as crowd:
            # First, since all else needs this version's catalog.
            yield scale, site, crowd, missed(scale, site, crowd, "upgrade")


def missed(scale: ModuleType, site: Any, crowd: Any, name: str) -> list[str]:
    figures = scale.record.Figures()
    scale.take(figures, scale.scenarios(site, crowd, 1, True)[name]())
    scale.take(figures, scale.observations(site, crowd))
    return scale.record.sentences(figures, scale.BOUNDS, "missed")


def test_an_upgrade_of_one_process_at_a_time(bench: tuple[ModuleType, Any, Any, list[str]]) -> None:
    assert bench[3] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_is_within_its_bound(bench: tuple[ModuleType, Any, Any, list[str]], name: str) -> None:
    assert missed(*bench[:3], name) == []
