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
    from engine.adapters.foreign import has_probe, inspect, publish
    from engine.config import served_name
    from flows import display
    from tasks.outcome import Stages

    display.base_builder(settings, Stages())()
    foreign, base = inspect(settings, path)
    found = foreign.found
    ranks = ", ".join(f"{rank} on {count}" for rank, count in found.ranks.items())
    display.print_row(asdict(found) | {"ranks": f"{ranks} modules", "digest": foreign.digest(base.digest)})
    if policy is None:
        typer.echo("Nothing was imported: give --policy NAME to import it.")
        return
    manifest = publish(settings, path, foreign, base, policy, owner)
    typer.echo(f"It is imported as {served_name(policy, manifest.digest)}.")
    if not has_probe(settings, manifest):
        typer.echo(
            "It has no effect probe, as no trainer of ours made it: that the engine computes what its "
            "trainer did is not proven."
        )
