"""Try a policy before training: what the base earns, and whether GRPO can learn from it."""

from pathlib import Path

from engine.base.fitting import fitted_policy
from engine.base.prompts import tokenizer_of
from engine.base.resident import ensure_base
from engine.clients.engine import EngineClient
from engine.problems.procedural import check_task
from engine.problems.verifiers import Verifier
from engine.settings.own_functions import refuse_unlisted
from engine.settings.params import Params
from engine.training.line_of_training import Line
from engine.training.reward_signal import Trial
from engine.training.rollout_data import Sampler, Source, draw, judge

ANSWERS = 32


def try_policy(params: Params, policy: str, key: str) -> Trial:
    """Sample `ANSWERS` answers of the base to the policy's first training problems, and score them.

    Raises `ServiceError` when the engine does not run, and the errors of the policy's task and verifier.
    """
    config = fitted_policy(params, policy).config
    config = config.model_copy(update={"groups": max(1, ANSWERS // config.group_size)})
    check_task(config.task)
    refuse_unlisted("verifier", config.verifier, params.python_modules)
    with Verifier(config) as verifier:
        with EngineClient(params.url("engine")) as engine:
            engine.marker()
        base = ensure_base(params.base, params.paths)
        tokenizer, name = tokenizer_of(base.path), Path(params.base.name).name
        source = Source(
            policy, config, Line("", None, config.seed, ()), tokenizer, params.url("engine"), key, name
        )
        drawn = draw(source, 0, Sampler(0, None), *source.problems(0))
        return Trial.of(policy, config, drawn, judge(verifier, drawn))
