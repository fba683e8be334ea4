"""A release driven to its end by the product's own rules and writes, with a hand on every effect."""

from collections.abc import Callable, Iterator
from typing import Any

from engine.catalog.catalog import Catalog, Release
from engine.controller.advance import Evidence, advance
from engine.controller.apply import Applier
from engine.quality.canary import CanaryResult
from engine.settings.releases import ReleaseConfig
from tests.helpers.canary_results import judged
from tests.helpers.rows import ACCEPTED, NEW

SETTINGS = ReleaseConfig(min_units=10).model_dump(mode="json")


class Killed(BaseException):
    """Stands for kill -9: nothing in the product catches it."""


def die() -> None:
    raise Killed


class Boundary:
    """Passes calls through to a real store, or its parts, and calls `then` after the n-th effect of all.

    By default the caller dies there.
    """

    effects = ("tombstones.add", "routes.update", "releases.update", "emit")

    def __init__(
        self, real: Any, countdown: Iterator[int], last: int, part: str = "", then: Callable[[], None] = die
    ):
        self._real, self._countdown, self._last, self._part = real, countdown, last, part
        self._then = then

    def __getattr__(self, name: str) -> Any:
        found, path = getattr(self._real, name), f"{self._part}{name}"
        if not callable(found):
            return Boundary(found, self._countdown, self._last, f"{path}.", self._then)
        if path not in self.effects:
            return found

        def effect(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            if next(self._countdown) == self._last:
                self._then()
            return result

        return effect


CANARIES = {
    "promote": judged(50, 200, (1.0, 1.0), -0.1, 0.2),
    "rollback": judged(8, 32, (0.0, 1.0), -1.0, -0.2),
    "hold": judged(5, 20, (1.0, 1.0), -0.5, 0.5),
}


def see(catalog: Catalog, release: Release, result: CanaryResult) -> Evidence:
    stone = catalog.tombstones.find("sorting", NEW)
    reason = stone.reason if stone else None
    route, late_s = catalog.routes.get("sorting"), SETTINGS["max_s"]
    return Evidence(0.0, route, ACCEPTED, None, result, reason, step_s=late_s)


def drive(catalog: Any, spool: Any, result: CanaryResult) -> None:
    applier = Applier(catalog, spool)
    for release in catalog.releases.all(open_only=True):
        while release.state == "running":
            evidence = see(catalog, release, result)
            release = applier.apply(release, advance(release, evidence), evidence)
