"""Write docs/cli.md from the command line and docs/configuration.md from the settings models.

Run `python docs/generate.py` after a change of a command or a setting; a test compares the committed pages.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from engine.settings.evaluators import EvaluatorConfig
from engine.settings.params import Params
from engine.settings.policies import PolicyConfig
from flows.cli.command import app

DOCS = Path(__file__).parent
METAVARS = {"str": "TEXT", "list[str]": "TEXT", "int": "N", "float": "X", "Path": "PATH"}
NOTE = "<!-- Written by docs/generate.py from {}. Change it there. -->"
# What nearly every command takes, which the page says once.
SHARED_OPTIONS = ("--json", "--params")
# Settings by name, whose fields have a section of their own.
IN_OWN_SECTION = {"evaluators"}
EXIT_CODES = {
    0: "Success.",
    1: "Any other error. `graftwork run`: a check of the main job failed.",
    2: "A setting, an option or a form is invalid.",
    3: "The base is missing, incomplete or another one.",
    4: "An adapter cannot be accepted, or is damaged.",
    5: "Not found: policy, revision, suite, key or release.",
    6: "Conflict: somebody else holds it, or a name is ambiguous or taken.",
    7: "A service is down, full, or answered with a fault.",
    130: "Ended by Ctrl-C.",
    143: "Ended by SIGTERM.",
}

SETTINGS_INTRO = """\
Settings are in `params.yaml`, or in the file that `--params` names. Outside `policies` every setting has a
default, so the file holds only what differs from it:

```yaml
engine:
  port: 9460
release:
  weight: 0.1
```

An unknown key is an error. A policy's settings are merged in this order: defaults, on a real base those
that [follow from its width](real-model.md#4-your-data), `policies.NAME` in `params.yaml`,
`eval_suites/NAME/policy.yaml` (written by `graftwork policy create`), flow parameters. `graftwork policy show
NAME` prints each value with its source. With `--base NAME`, what a file `params.NAME.yaml` beside the
settings sets takes precedence over them."""


def pages() -> dict[str, str]:
    """Return the text of each generated page by its file name."""
    return {"cli.md": cli_page(), "configuration.md": configuration_page()}


def table(*rows: tuple[str, ...]) -> str:
    """Return a Markdown table; the first row is its header."""
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def code(text: object) -> str:
    return f"`{text}`"


# The command line


def cli_page() -> str:
    """Return the page of every command, argument and option."""
    root = typer.main.get_command(app)
    found = list(commands(root, "graftwork"))
    runnable = [(name, one) for name, one in found if not hasattr(one, "commands")]
    groups: dict[str, list[tuple[str, ...]]] = {}
    for name, one in runnable:
        row = (f"[{code(name)}](#{name.replace(' ', '-')})", first_line(one))
        groups.setdefault(panel_of(root, name), []).append(row)
    return "\n\n".join(
        [
            "# Command line",
            NOTE.format("the help texts in flows/cli"),
            f"{root.help} The command is `.venv/bin/graftwork`; `--help` works everywhere, and "
            "`graftwork --install-completion` has your shell complete commands and options.",
            shared_options(runnable),
            *(f"**{title}**\n\n{table(('command', 'does'), *rows)}" for title, rows in groups.items()),
            "Exit codes:",
            table(("code", "meaning"), *((str(key), says) for key, says in EXIT_CODES.items())),
            *(section(name, one) for name, one in found),
        ]
    )


def shared_options(runnable: list[tuple[str, Any]]) -> str:
    """Return what is said once of the options that nearly every command has."""
    lines = []
    for option in SHARED_OPTIONS:
        having = [one for _, command in runnable for one in command.params if option in one.opts]
        without = [code(name) for name, command in runnable if not has_option(command, option)]
        words = f" (default: {default_of(having[0])})" if default_of(having[0]) else ""
        lines.append(
            f"- {spelled(having[0])}{words}: {having[0].help} Every command has it but {', '.join(without)}."
        )
    return "\n".join(lines)


def has_option(command: Any, option: str) -> bool:
    return any(option in one.opts for one in command.params)


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the full name and the command of each group and command below `command`."""
    for word, each in command.commands.items():
        yield f"{name} {word}", each
        if hasattr(each, "commands"):
            yield from commands(each, f"{name} {word}")


def panel_of(root: Any, name: str) -> str:
    """Return the heading under which the help has a command, or the group that it is in."""
    panel = root.commands[name.split()[1]].rich_help_panel
    return panel if isinstance(panel, str) else "Daily work"


def first_line(command: Any) -> str:
    return inspect.cleandoc(command.help or "").splitlines()[0]


def section(name: str, command: Any) -> str:
    """Return a command's section."""
    parts = [f"{'#' * name.count(' ')}# {name}", inspect.cleandoc(command.help or "")]
    if own := [one for one in command.params if not set(one.opts) & set(SHARED_OPTIONS)]:
        parts.append(parameters(own))
    return "\n\n".join(parts)


def parameters(given: list[Any]) -> str:
    """Return the table of arguments and options."""
    rows = [(spelled(each), default_of(each), described(each)) for each in given]
    return table(("argument or option", "default", "meaning"), *rows)


def spelled(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = parameter.metavar or parameter.name.upper()
        return code(name if parameter.required or parameter.metavar else f"[{name}]")
    names = "/".join([*parameter.opts, *parameter.secondary_opts])
    if parameter.is_flag:
        return code(names)
    return code(f"{names} {parameter.metavar or METAVARS[parameter.bare_type()]}")


def default_of(parameter: Any) -> str:
    if parameter.required:
        return "required"
    return "" if parameter.default in (None, False, [], ()) else code(parameter.default)


def described(parameter: Any) -> str:
    return " ".join(filter(None, [parameter.help or "", sentence(bounds(parameter.min, parameter.max))]))


def bounds(
    low: float | None, high: float | None, over: float | None = None, under: float | None = None
) -> str:
    """Return a range in words, empty without a limit; `over` and `under` are excluded from it."""
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    limits = {"at least": low, "above": over, "at most": high, "below": under}
    return ", ".join(f"{word} {limit:g}" for word, limit in limits.items() if limit is not None)


def sentence(words: str) -> str:
    return words[:1].upper() + words[1:] + "." if words else ""


# The settings


def configuration_page() -> str:
    """Return the page of every setting of `params.yaml`."""
    schema = Params.model_json_schema()
    models = {name: one.annotation for name, one in Params.model_fields.items() if is_model(one.annotation)}
    plain = {
        key: one for key, one in schema["properties"].items() if key not in {*models, "source", "policies"}
    }
    return "\n\n".join(
        [
            "# Configuration",
            NOTE.format("the models in engine/settings"),
            SETTINGS_INTRO,
            "## Top level",
            rows_of("", plain, schema),
            *(model_section(name, model) for name, model in models.items()),
            model_section("release.evaluators.NAME", EvaluatorConfig),
            model_section("policies.NAME", PolicyConfig),
            model_section("policies.NAME.loss_config", PolicyConfig.model_fields["loss_config"].annotation),
        ]
    )


def is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def model_section(name: str, model: Any) -> str:
    """Return the section of the settings below `name`."""
    schema = model.model_json_schema()
    own = {
        key: one
        for key, one in schema["properties"].items()
        if not is_model(model.model_fields[key].annotation) and key not in IN_OWN_SECTION
    }
    return "\n\n".join([f"## {name}", inspect.cleandoc(model.__doc__), rows_of(f"{name}.", own, schema)])


def rows_of(prefix: str, properties: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return the table of a JSON schema's properties."""
    required = schema.get("required", ())
    rows = [
        (
            code(prefix + key),
            kind(one, schema),
            "required" if key in required else setting_default(one.get("default")),
            limits(one),
            one.get("description", ""),
        )
        for key, one in properties.items()
    ]
    return table(("setting", "type", "default", "bound", "meaning"), *rows)


def kind(one: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return a JSON schema's type in words."""
    if "anyOf" in one:
        return " or ".join(kind(each, schema) for each in one["anyOf"] if each != {"type": "null"})
    if "enum" in one:
        return ", ".join(code(each) for each in one["enum"])
    if "$ref" in one:
        names = schema["$defs"][one["$ref"].rpartition("/")[2]]["properties"]
        return f"mapping of {', '.join(names)}"
    if one.get("type") == "array":
        return (
            f"list of {len(one['prefixItems'])} numbers"
            if "prefixItems" in one
            else f"list of {kind(one['items'], schema)}"
        )
    return {"object": "mapping", "string": "text"}.get(one["type"], one["type"])


def limits(one: dict[str, Any]) -> str:
    """Return a JSON schema's limits in words; those of alternatives are joined."""
    if "anyOf" in one:
        return "; ".join(filter(None, map(limits, one["anyOf"])))
    if "prefixItems" in one:
        return ", ".join(map(limits, one["prefixItems"]))
    found = [
        bounds(*(one.get(key) for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))),
        f"at least {one['minItems']} entries" if "minItems" in one and "prefixItems" not in one else "",
        code(one["pattern"]) if "pattern" in one else "",
    ]
    return ", ".join(filter(None, found))


def setting_default(value: object) -> str:
    """Return a default as YAML has it; a path of the checkout is relative to it."""
    if value in (None, [], {}):
        return ""
    if isinstance(value, bool):
        return code(str(value).lower())
    if isinstance(value, int) and value % (1 << 20) == 0 and value:
        return f"{code(value)} ({value >> 20} MiB)"
    return code(str(value).removeprefix(f"{DOCS.parent.absolute()}/"))


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text + "\n")
