"""Faults of settings and forms are sentences: no regular expression is shown to a person."""

from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, ValidationError, create_model

from engine.settings import forms
from engine.settings.model import explain
from engine.settings.params import Params

MODELS = [Params, *forms.Form.__subclasses__()]


def patterns(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from filter(None, [schema.get("pattern")])
        yield from schema.get("patternProperties", ())
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from patterns(part)


def sentence(pattern: str) -> str:
    """Return how a value that does not match is refused."""
    model = create_model("Any", field=(Annotated[str, Field(pattern=pattern)], ...))
    with pytest.raises(ValidationError) as refused:
        model(field="\n?")
    return explain(refused.value, model)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_no_pattern_is_shown(model: type[BaseModel]) -> None:
    for pattern in patterns(model.model_json_schema()):
        said = sentence(pattern)
        assert said.startswith("`field`: Input should be "), said
        assert not set("^$[{\\*") & set(said.removesuffix("(found '\\n?').").replace("* * *", "")), said


def test_choices_are_listed() -> None:
    with pytest.raises(ValidationError) as refused:
        forms.CreatePolicyForm.model_validate({"name": "My_Policy", "data": "x.jsonl", "verifier": "guess"})
    assert explain(refused.value, forms.CreatePolicyForm) == (
        "`name`: Input should be small letters, digits and hyphens, a letter first, at most 63 "
        "(found 'My_Policy'). "
        "`verifier`: Input should be exact, numeric, regex, json-schema, python:MODULE:FUNC, likelihood or "
        "preference (found 'guess')."
    )
