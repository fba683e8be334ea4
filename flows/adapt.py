"""Adapt one policy: train -> export -> register -> verify -> score."""

from prefect import flow
from prefect.artifacts import create_link_artifact, create_table_artifact

from engine.config import Params, PolicyConfig, served_name
from flows.display import training_bar
from tasks import steps
from tasks.outcome import Adapted, Stages, local_key


@flow(name="adapt", flow_run_name="adapt {policy}")
def adapt(params: Params, policy: str, config: PolicyConfig | None = None, scored: bool = True) -> Adapted:
    """Train a policy on the resident base, then export, register, verify and score its revision.

    `config` replaces the policy's settings; without `scored` the revision has no offline score.
    """
    config, key, stages = config or params.policy(policy), local_key(params), Stages()
    with stages("train"):
        trained = steps.train(params, policy, config, key, training_bar(policy, config.steps))
    with stages("register"):
        version = steps.register(params, policy, trained.directory, trained.curve)
    with stages("verify"):
        steps.verify(params, policy, trained.digest, key)
    base = revision = None
    if scored:
        with stages("score"):
            base = steps.score(params, policy, None, config.suite, key)
            revision = steps.score(params, policy, trained.digest, config.suite, key)
    adapted = Adapted(policy, trained.digest, trained.directory, version, base, revision, stages.seconds)
    create_table_artifact([adapted.row()], f"revision-{policy}", f"The newest revision of {policy}")
    create_link_artifact(
        f"{params.url('mlflow')}/#/models/{policy}/versions/{version}",
        served_name(policy, trained.digest),
        f"registry-{policy}",
    )
    return adapted
