"""Which policies are due, as rows for people."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from engine.settings.params import Params, known_policies


def due_policies(params: Params, only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return {"policy", "due", "reason", "seed"} for each policy, or for those of `only`.

    The seed follows from the newest revision: one that is too old or unloved is not found finished again.

    A policy that is named is judged as if it were scheduled. Raises `ConfigError` for an unknown one.
    """
    from engine.catalog.catalog import open_catalog
    from engine.controller.due import Facts, judge
    from engine.controller.facts import gather

    with open_catalog(params.paths) as catalog:
        facts = [gather(params, name, catalog) for name in (only or known_policies(params))]
    if only:
        scheduled = {"scheduled": True}
        facts = [Facts(**{**vars(one), "config": one.config.model_copy(update=scheduled)}) for one in facts]
    return [asdict(judge(one)) | {"seed": one.seed} for one in facts]
