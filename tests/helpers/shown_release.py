"""A release with a ramp from its first user to its promotion, for pages that show it; time passes at once."""

import random
import time
from unittest.mock import patch

from engine.catalog.catalog import Release, migrate
from engine.catalog.opening import whole_catalog
from engine.controller.evidence import EvidenceReader
from engine.controller.release_loop import Controller
from engine.settings.params import Params
from tests.helpers.canary_users import Users
from tests.helpers.rows import NEW, OLD, fill

RAMP = {"ramp": [0.1, 0.25], "weight": 0.5, "bake_s": 60, "min_units": 20, "step_s": 120}
# Seconds between two users, and how many come between two looks of the controller.
PAUSE_S, BATCH = 0.2, 30


def released(params: Params, canary: float, baseline: float) -> Release:
    """Release a canary whose users are content so often, and return the release once it has ended.

    The first of the canary's users are answered by the champion, since the canary is not resident yet.
    """
    migrate(params.paths.catalog_url)
    with whole_catalog(params.paths.catalog_url) as catalog:
        fill(catalog)
    began, passed, chance = time.time(), [0.0], random.Random(4)

    def now() -> float:
        return began + passed[0]

    with patch("time.time", now):
        controller, users = Controller(params, "test"), Users(params, now)
        controller.reader = EvidenceReader(controller.catalog, now)
        release = controller.decisions.start("sorting", NEW, RAMP, {"score": "not scored here"}, "ann")
        while release.state == "running":
            controller.tick()
            release = controller.catalog.releases.get(release.id)
            route = controller.catalog.routes.get("sorting")
            for number in range(BATCH):
                passed[0] += PAUSE_S
                is_canary = chance.random() < route.weight
                is_there = passed[0] > 10
                digest = NEW if is_canary and is_there else OLD
                arm = ("canary" if is_there else "fallback") if is_canary else "champion"
                reward = float(chance.random() < (canary if digest == NEW else baseline))
                seconds = chance.lognormvariate(-3, 0.3)
                seen = {"status": 200, "outcome": "ok", "ttft_s": seconds, "token_s": seconds / 10}
                users.ask(digest, reward, arm, version=route.version, key=f"key-{number % 3}", **seen)
            users.spool.rotate()
        controller.due.clear()
        controller.tick()
        controller.close()
    return release
