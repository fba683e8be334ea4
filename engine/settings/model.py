"""The base class of all settings models, and validation errors as sentences."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class Settings(BaseModel):
    """A frozen settings model that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Return a validation error as sentences with each key, the fault and what is allowed."""
    sentences = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            allowed = ", ".join(sorted(_fields_at(model, item["loc"][:-1])))
            sentences.append(f"Unknown key `{where}`; allowed here: {allowed}.")
        else:
            sentences.append(f"`{where}`: {item['msg']} (found {item['input']!r}).")
    return " ".join(sentences)


def _fields_at(model: Any, loc: tuple[int | str, ...]) -> list[str]:
    for part in loc:
        fields = getattr(model, "model_fields", None)
        if fields is None or part not in fields:
            # A key of a mapping such as `policies`: its values share one model.
            continue
        annotation = fields[str(part)].annotation
        model = getattr(annotation, "__args__", (annotation,))[-1]
    return list(getattr(model, "model_fields", {}))
