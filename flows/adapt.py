"""The flow `adapt`: train, export, register, verify and score one policy."""

from collections.abc import Sequence
from typing import Any

from prefect import flow

from engine.base.fitting import fitted_policy
from engine.catalog.records import served_name
from engine.settings.forms import AdaptForm
from flows.display import training_bar
from flows.entry import flow_settings
from tasks import steps
from tasks.outcome import Adapted, Stages, local_key
from tasks.progress import both, keep_sources, show_link, show_table, tag_run, training_artifact


@flow(name="adapt", flow_run_name="adapt {form.policy}")
def adapt(form: AdaptForm) -> Adapted:
    """Train a policy on the resident base, then export, register, verify and score its revision."""
    params = flow_settings()
    resolved = fitted_policy(params, form.policy, form.changes())
    policy, config, key, stages = form.policy, resolved.config, local_key(params), Stages()
    tag_run(f"policy:{policy}")
    with stages("train"):
        shown = both(training_bar(policy, config.steps), training_artifact(policy, config.steps))
        trained = steps.train(params, policy, config, key, shown)
    tag_run(f"revision:{served_name(policy, trained.digest)}")
    keep_sources(params, policy, trained.digest, resolved)
    with stages("register"):
        version = steps.register(params, policy, trained.directory, trained.curve)
    with stages("verify"):
        steps.verify(params, policy, trained.digest, key)
    base = revision = part = None
    general: Sequence[Any] = ()
    if form.scored:
        with stages("score"):
            base = steps.score(params, policy, None, config.suite, key)
            champion = steps.score_champion(params, policy, trained.digest, config.suite, key)
            if config.score_reads == "all":
                revision = steps.score(params, policy, trained.digest, config.suite, key, (base, champion))
            else:
                baseline, target = champion or base, config.score_reads
                part = steps.score_part(params, policy, trained.digest, baseline, key, target)
            if config.keeps:
                steps.score_kept(params, policy, trained.digest, config.keeps, key)
            if config.general:
                general = steps.score_general(params, policy, trained.digest, key)
    steps.update_page(params, policy, trained.digest)
    adapted = Adapted(
        policy, trained.digest, trained.directory, version, base, revision, stages.seconds, general, part
    )
    show_table([adapted.row()], f"revision-{policy}", f"The newest revision of {policy}")
    page = f"{params.url('mlflow')}/#/models/{policy}/versions/{version}"
    show_link(page, served_name(policy, trained.digest), f"registry-{policy}")
    return adapted
