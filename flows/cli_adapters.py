"""Commands about adapters that were trained elsewhere: look at one, and bring it in as a revision."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flows.entry import PARAMS, ParamsFile, enter

app = typer.Typer()
adapters_app = typer.Typer(help="Adapters that were trained elsewhere.", no_args_is_help=True)
app.add_typer(adapters_app, name="adapters")


@adapters_app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="Its directory: adapter_config.json and safetensors.")],
    policy: Annotated[
        str | None, typer.Option(help="The policy that it becomes a revision of; none: only look at it.")
    ] = None,
    owner: Annotated[str, typer.Option(help="Whose policy it is.")] = "local",
    params: ParamsFile = PARAMS,
) -> None:
    """Detect an adapter's layout, print what it holds, and import it as a revision of a policy."""
    settings = enter(params)
    from engine import services
    from engine.adapters.foreign import inspect, publish
    from engine.config import served_name
    from engine.training.probing import probe_by_base
    from flows import display
    from tasks.outcome import Stages, local_key
    from tasks.serve import prove

    display.base_builder(settings, Stages())()
    foreign, base = inspect(settings, path)
    found = foreign.found
    ranks = ", ".join(f"{rank} on {count}" for rank, count in found.ranks.items())
    display.print_row(asdict(found) | {"ranks": f"{ranks} modules", "digest": foreign.digest(base.digest)})
    if policy is None:
        typer.echo("Nothing was imported: give --policy NAME to import it.")
        return
    make_probe = probe_by_base(settings, base, typer.echo)
    manifest = publish(settings, path, foreign, base, policy, owner, make_probe)
    name = served_name(policy, manifest.digest)
    typer.echo(f"It is imported as {name}.")
    if any(state.name == "engine" and state.state == "running" for state in services.status(settings)):
        typer.echo(f"Effect probe: {prove(settings, policy, manifest.digest, local_key(settings))}")
    else:
        typer.echo(f"No engine is up to prove it: `graftwork serve --revision {name}` does.")
