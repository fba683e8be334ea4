"""The scheduled flow `nightly`: looks at champions again, adapts and releases the policies that are due."""

from typing import Any

from prefect import flow

from engine.errors import GraftworkError
from engine.settings.forms import AdaptForm, NightlyForm
from engine.settings.params import Params
from flows.adapt import adapt
from flows.entry import flow_settings
from tasks import steps
from tasks.outcome import local_key
from tasks.progress import show_table


@flow(name="nightly")
def nightly(form: NightlyForm) -> list[dict[str, Any]]:
    """Look at every champion again, adapt every policy that is due and release what passed.

    A failed policy does not stop the others.
    """
    params = flow_settings()
    rows = steps.due_policies(params, form.policies)
    for row in rows:
        row["champion"] = _recheck(params, row["policy"])
        row["outcome"] = "skipped" if not row["due"] else _adapt_and_release(params, row, form)
        show_table(rows, "nightly", "Due policies and their outcomes")
    if failed := [row["policy"] for row in rows if "failed" in (row["champion"][:6], row["outcome"][:6])]:
        raise GraftworkError(f"These policies failed: {', '.join(failed)}. See the table `nightly`.")
    return rows


def _recheck(params: Params, policy: str) -> str:
    try:
        return steps.recheck(params, policy, local_key(params))
    except Exception as error:
        # Any failure: the policy may be due, and so may the others.
        return f"failed: {error}"


def _adapt_and_release(params: Params, row: dict[str, Any], form: NightlyForm) -> str:
    policy = row["policy"]
    try:
        adapted = adapt(AdaptForm(policy=policy, seed=row["seed"]))
        if not form.release:
            return f"adapted to {adapted.digest}"
        return steps.release_in_background(params, policy, adapted.digest)
    except Exception as error:
        # Any failure: the other policies are still due.
        return f"failed: {error}"
