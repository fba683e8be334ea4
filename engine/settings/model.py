"""The base class of all settings models, and validation errors as sentences."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from engine.settings.own_functions import OWN

# What a pattern asks for, in words; one of choices, `^(a|b)$`, needs none.
PATTERNS = {
    r"^[a-z][a-z0-9-]{0,62}$": "small letters, digits and hyphens, a letter first, at most 63",
    r"^[\w.-]{1,64}$": "1 to 64 letters, digits, dots, hyphens or underscores",
    r"^[A-Za-z_][\w.]*$": "a Python module, such as rules.mine",
    r"^[0-9a-f]{6,64}$": "6 to 64 hexadecimal digits",
    r"^[0-9a-f]{12,64}$": "12 to 64 hexadecimal digits",
    r"^([0-9a-f]{40}|[0-9a-f]{64})$": "the 40 hexadecimal digits of a commit, or the 64 of a sha256",
    r"^(adapt|[0-9a-f]{64})$": "adapt, or a digest of 64 hexadecimal digits",
    r"^[a-z][a-z0-9-]{0,62}@[0-9a-f]{6,64}$": "POLICY@DIGEST, with 6 to 64 digits of the digest",
    r"^https?://[^/?#@]+$": "http:// or https:// and a host, such as https://controller.example:8462",
    r"^https?://[^?#@]+$": "http:// or https://, a host and a path, such as https://judge.example/v1",
    r"^[a-z][a-z0-9+.]*://[^?#]+$": "a URL such as s3://bucket/adapters",
    r"^([a-z][a-z0-9+.]*://[^?#]+|/.+)$": "a URL such as s3://bucket/ledger, or a directory's whole path",
    r"^\s*\S+(\s+\S+){4}\s*$": "five fields of cron, such as 0 3 * * *",
}

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
OpenFraction = Annotated[float, Field(gt=0.0, lt=1.0)]


class Settings(BaseModel):
    """A frozen settings model that refuses unknown keys."""

    # A command's start-up does not wait for the validators of settings that it never reads.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), defer_build=True)


def configured(model: type[Settings], name: str) -> Any:
    """Return a form's field that replaces a setting: with its sentence and bounds, empty "as configured"."""
    setting = model.model_fields[name]
    field = FieldInfo.from_field(None, description=setting.description)
    field.metadata = list(setting.metadata)
    return field


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Return a validation error as sentences with each key, the fault and what is allowed."""
    sentences = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            allowed = ", ".join(sorted(_fields_at(model, item["loc"][:-1])))
            sentences.append(f"Unknown key `{where}`; allowed here: {allowed}.")
        else:
            sentences.append(f"`{where}`: {_wanted(item)} (found {item['input']!r}).")
    return " ".join(sentences)


def _wanted(item: ErrorDetails) -> str:
    """Return pydantic's message, with a pattern in words: its choices, or those of `PATTERNS`."""
    pattern = str(item.get("ctx", {}).get("pattern", ""))
    if pattern in PATTERNS:
        return f"Input should be {PATTERNS[pattern]}"
    if not (pattern.startswith("^(") and pattern.endswith(")$")):
        return item["msg"]
    said = pattern[2:-2].replace(OWN, "python:MODULE:FUNC").replace(r":\S+", ":NAME")
    *choices, last = said.split("|")
    return f"Input should be {', '.join(choices)} or {last}"


def _fields_at(model: Any, loc: tuple[int | str, ...]) -> list[str]:
    for part in loc:
        fields = getattr(model, "model_fields", None)
        if fields is None or part not in fields:
            # A key of a mapping such as `policies`: its values share one model.
            continue
        annotation = fields[str(part)].annotation
        model = getattr(annotation, "__args__", (annotation,))[-1]
    return list(getattr(model, "model_fields", {}))
