"""The flow `create_policy`: a policy from your own data and verifier."""

from typing import Any

from prefect import flow

from engine.settings.forms import CreatePolicyForm
from flows.entry import flow_settings
from tasks import steps
from tasks.progress import show_table, tag_run


@flow(name="create_policy", flow_run_name="create {form.name}")
def create_policy(form: CreatePolicyForm) -> dict[str, Any]:
    """Split the data into training and frozen items, write the suite, register the policy."""
    tag_run(f"policy:{form.name}")
    created = steps.create_policy(flow_settings(), form)
    show_table([created], f"policy-{form.name}", f"The policy {form.name}")
    return created
