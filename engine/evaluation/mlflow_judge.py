"""A judge that was made in MLflow: its instructions and its model, which are asked as every other judge is.

Only judges made of instructions are taken. A function that was stored with `@scorer` is source code, which
MLflow would execute.
"""

import json
from typing import Any

import httpx

from engine.clients.http_client import connect
from engine.errors import ConfigError, NotFound, ServiceError
from engine.evaluation.judge import Judge, judge_of
from engine.security.credentials import USER, known_credential
from engine.settings.evaluators import MLFLOW, EvaluatorConfig
from engine.settings.params import Params

# MLflow's experiment "Default", in which a judge is registered unless another one is named.
EXPERIMENT = "0"
GET = "/api/3.0/mlflow/scorers/get"
# How instructions name what they are given.
NAMES = "In what follows, {{ inputs }} is the question and {{ outputs }} is the answer that is scored.\n\n"


def stored_judge(params: Params, config: EvaluatorConfig) -> Judge:
    """Return the judge of this name and version in MLflow.

    Raises `NotFound` where there is none, `ConfigError` where it is no judge made of instructions, and
    `ServiceError` while MLflow does not answer.
    """
    name = config.kind.removeprefix(MLFLOW)
    login = httpx.BasicAuth(USER, known_credential(params.paths, "mlflow"))
    asked = {"experiment_id": EXPERIMENT, "name": name, "version": str(_version(config))}
    try:
        with connect(params.url("mlflow"), login=login) as client:
            response = client.request("GET", GET, params=asked)
    except httpx.HTTPError as error:
        raise ServiceError(f"MLflow does not answer ({error!r}), which has the judge {name!r}.") from None
    if not response.is_success:
        raise NotFound(
            f"MLflow has no judge {name!r} of version {config.version} in its experiment Default: "
            f"{response.text[:200]}"
        )
    model, instructions = read_judge(name, response.json())
    return judge_of(params.paths, config, model, NAMES + instructions)


def _version(config: EvaluatorConfig) -> int:
    if not config.version.isdecimal():
        raise ConfigError(f"`version` of {config.kind} is the judge's version in MLflow, such as 1.")
    return int(config.version)


def read_judge(name: str, answer: dict[str, Any]) -> tuple[str, str]:
    """Return model and instructions of a stored judge; `ConfigError` for anything else that is stored."""
    stored = answer["scorer"]["serialized_scorer"]
    told = json.loads(stored) if isinstance(stored, str) else stored
    judge = told.get("instructions_judge_pydantic_data")
    if not isinstance(judge, dict) or told.get("call_source"):
        raise ConfigError(
            f"{name!r} in MLflow is no judge made of instructions. Code of `@scorer` is not executed: put it "
            "into a module, and name it python:MODULE:FUNC."
        )
    # openai:/gpt-5-mini: the provider is what is at `url`.
    return str(judge.get("model")).partition(":/")[2], str(judge["instructions"])
