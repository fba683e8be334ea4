"""Lists which policies the nightly flow adapts now, and why."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from engine.settings.params import Params, known_policies


def due_policies(params: Params, only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return {"policy", "due", "reason", "seed"} for each policy, or for those in `only`.

    The seed derives from the newest revision, so that training starts anew rather than finding that revision
    finished. Policies in `only` count as scheduled. Raises `ConfigError` for an unknown policy.
    """
    from engine.catalog.opening import open_catalog
    from engine.controller.due import Facts, judge
    from engine.controller.facts import gather

    with open_catalog(params.paths) as catalog:
        facts = [gather(params, name, catalog) for name in (only or known_policies(params))]
    if only:
        scheduled = {"scheduled": True}
        facts = [Facts(**{**vars(one), "config": one.config.model_copy(update=scheduled)}) for one in facts]
    return [asdict(judge(one)) | {"seed": one.seed} for one in facts]
