"""Users of a policy, as gateways spool their requests and ratings."""

import itertools
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from engine.catalog.opening import whole_catalog
from engine.ledger.ledger import Spool
from engine.settings.params import Params
from tests.helpers.rows import NEW, OLD


class Users:
    """What gateways spool about users, and about others who must not count; `clock` is the gateways'."""

    def __init__(self, params: Params, clock: Callable[[], float] = lambda: time.time()):
        self.spool = Spool(params.paths.spool, "gateway")
        self._number = itertools.count()
        self._url, self._clock = params.paths.catalog_url, clock

    def ask(
        self,
        digest: str | None,
        reward: float,
        arm: str,
        unit: str | None = "own",
        version: int | None = None,
        **more: Any,
    ) -> None:
        """Spool one request and its rating, under the route of that version, by default the current one."""
        self._ask(digest, reward, arm, unit, version or self.route_version(), **more)

    def crowd(
        self, canary: float, baseline: float, pairs: int, champion: str | None = OLD, **more: Any
    ) -> None:
        """Spool `pairs` users of the canary, and four of the baseline for each, with these rewards."""
        version = self.route_version()
        for _ in range(pairs):
            self._ask(NEW, canary, "canary", "own", version, **more)
            for _ in range(4):
                self._ask(champion, baseline, "champion" if champion else "base", "own", version, **more)
        self.spool.rotate()

    def route_version(self) -> int:
        """Return the version of the policy's route now."""
        with closing(whole_catalog(self._url)) as catalog:
            return catalog.routes.get("sorting").version

    def _ask(
        self, digest: str | None, reward: float, arm: str, unit: str | None, version: int, **more: Any
    ) -> None:
        at = self._clock()
        id, key = self._see(digest, arm, unit, version, at, **more)
        self.spool.emit("feedback", request_id=id, reward=reward, key=key, at=at)

    def see(self, digest: str | None, arm: str, version: int) -> str:
        """Spool the request of a user who rates nothing; return its id."""
        id, _ = self._see(digest, arm, "own", version, self._clock())
        return id

    def _see(
        self, digest: str | None, arm: str, unit: str | None, version: int, at: float, **more: Any
    ) -> tuple[str, str]:
        id = f"request-{next(self._number)}"
        fields = {"policy": "sorting", "digest": digest, "arm": arm, "key": "k", "purpose": "user"} | more
        key = fields["key"]
        unit = id if unit == "own" else unit
        self.spool.emit("observations", id=id, unit=unit, at=at, route_version=version, **fields)
        return id, key
