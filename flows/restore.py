"""The flow `restore`: make an earlier revision the champion again."""

from typing import Any

from prefect import flow

from engine.settings.forms import RestoreForm
from flows.entry import flow_settings
from tasks import steps
from tasks.progress import show_table, tag_run


@flow(name="restore", flow_run_name="restore {form.policy}")
def restore(form: RestoreForm) -> dict[str, Any]:
    """Make an earlier revision the champion again; without a digest, the previous champion."""
    tag_run(f"policy:{form.policy}")
    params = flow_settings()
    route = steps.restore(params, form)
    show_table([route], f"decision-{form.policy}", form.reason)
    steps.update_page(params, form.policy, route["champion"])
    return route
