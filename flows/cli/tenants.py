"""Commands for tenants: API keys with roles and limits, suspension."""

import re
import time
from dataclasses import fields
from typing import Annotated, Any, Literal

import typer

from engine.errors import ConfigError
from flows.entry import PARAMS, Json, ParamsFile, catalog, print_done, print_json, print_result, seconds_of

app = typer.Typer()
key_app = typer.Typer(
    help="Create, list, limit, rotate and revoke API keys of engine and controller.", no_args_is_help=True
)
KEYS = "Keys and tenants"
app.add_typer(key_app, name="key", rich_help_panel=KEYS)
Prefix = Annotated[str, typer.Argument(help="First digits of the key's id, as `key ls` shows it.")]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy", help="Allow only this policy, or with a prefix such as 'acme-*' these; repeatable."
    ),
]
PerLimit = Annotated[
    list[str] | None,
    typer.Option("--limit", help="Set a limit, such as tokens_per_day=100000; repeatable."),
]


@key_app.command("create")
def key_create(
    owner: Annotated[str, typer.Argument(help="Tenant of the key.")],
    scope: Annotated[
        str,
        typer.Option(help="Allow requests (user), also scoring and rollouts (score), or everything (admin)."),
    ] = "user",
    role: Annotated[
        list[str] | None,
        typer.Option(
            help="Allow this in place of a scope: infer, pin, feedback, score, train, release, metrics or "
            "admin; repeatable."
        ),
    ] = None,
    policy: Policies = None,
    limit: PerLimit = None,
    expires: Annotated[
        str | None, typer.Option(help="Let the key expire after this time, such as 90d or 12h.")
    ] = None,
    tinker: Annotated[
        bool, typer.Option("--tinker", help="Allow what Tinker's SDK does, and print the key as it wants it.")
    ] = False,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Create a key and print it. Only its hash is stored, so it cannot be printed again."""
    from engine.catalog.keys import as_tinkers

    until = time.time() + seconds_of(expires) if expires else None
    roles = role or ("tinker" if tinker else scope)
    plaintext = catalog(params).keys.create(owner, roles, policy or (), limits_of(limit), until)
    shown = as_tinkers(plaintext) if tinker else plaintext
    print_json({"key": shown}) if as_json else typer.echo(shown)


@key_app.command("ls")
def key_ls(as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """List keys with id, tenant, roles, policies, limits and state."""
    from flows.display import key_rows

    rows = key_rows(catalog(params).keys.all(), time.time())
    print_result(as_json, rows, fold=("tenant", "roles", "policies", "limits"))


@key_app.command("rotate")
def key_rotate(
    prefix: Prefix,
    overlap: Annotated[str, typer.Option(help="Keep the old key in force for this time.")] = "1h",
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Print a new key in place of an old one, which stays in force for a while."""
    key = catalog(params).keys.rotate(prefix, seconds_of(overlap))
    print_json({"key": key}) if as_json else typer.echo(key)


@key_app.command("revoke")
def key_revoke(prefix: Prefix, as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """Revoke a key, so that requests with it are refused."""
    revoked = catalog(params).keys.revoke(prefix)
    print_done(
        as_json, f"Key {revoked.id} of {revoked.owner} is revoked.", id=revoked.id, tenant=revoked.owner
    )


@key_app.command("limits")
def key_limits(
    name: Annotated[str, typer.Argument(help="First digits of a key's id, or with --tenant a tenant.")],
    limit: PerLimit = None,
    policy: Policies = None,
    tenant: Annotated[bool, typer.Option("--tenant", help="Set limits of all keys of a tenant.")] = False,
    weight: Annotated[
        float | None, typer.Option(help="With --tenant: its weight where the engine is full. 1 is usual.")
    ] = None,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Replace the limits of a key or a tenant; without --limit it has none."""
    keys = catalog(params).keys
    if not tenant:
        if weight is not None:
            raise ConfigError("A weight belongs to a tenant: add --tenant, and name the tenant.")
        changed = keys.limit(name, limits_of(limit), policy)
        done = f"Key {changed.id} of {changed.owner} has {told(changed.limits)}."
        return print_done(as_json, done, id=changed.id, tenant=changed.owner, limits=dict(changed.limits))
    if policy:
        raise ConfigError("Policies belong to keys: leave out --tenant, and name the key.")
    from dataclasses import replace

    known = keys.tenant(name)
    keys.set_tenant(replace(known, limits=limits_of(limit), weight=weight or known.weight))
    limits = limits_of(limit)
    print_done(as_json, f"Tenant {name} has {told(limits)}.", tenant=name, limits=limits)


@app.command(rich_help_panel=KEYS)
def tenant(
    action: Annotated[
        Literal["ls", "suspend", "resume"], typer.Argument(metavar="[ls|suspend|resume]", help="What to do.")
    ] = "ls",
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Owner of the keys.")] = None,
    reason: Annotated[str, typer.Option(help="Why it is suspended; the tenant reads it.")] = "",
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """List tenants with limits or a weight of their own, and suspended ones; suspend or resume one.

    All requests of a suspended tenant's keys are refused from now on. Answers under way end by themselves.
    """
    if (name is None) != (action == "ls") or (action == "suspend" and not reason):
        raise ConfigError("Write `tenant ls`, `tenant suspend NAME --reason WHY` or `tenant resume NAME`.")
    keys = catalog(params).keys
    if name is None:
        from flows.display import tenant_rows

        return print_result(as_json, tenant_rows(keys.tenants()), fold=("limits", "reason"))
    if action == "suspend":
        why = keys.suspend(name, reason).suspended_for
        return print_done(as_json, f"Tenant {name} is suspended: {why}", tenant=name, reason=why)
    keys.resume(name)
    print_done(as_json, f"Tenant {name} is resumed.", tenant=name)


def limits_of(given: list[str] | None) -> dict[str, float]:
    """Return limits from `name=number` words. Raises `ConfigError` for other words."""
    from engine.catalog.keys import Limits, checked_limits

    limits: dict[str, float] = {}
    for word in given or ():
        name, _, value = word.partition("=")
        if not re.fullmatch(r"\d+(\.\d+)?", value):
            known = ", ".join(field.name for field in fields(Limits))
            raise ConfigError(f"{word!r} is not a limit. Write NAME=NUMBER; names are {known}.")
        limits[name] = float(value)
    return checked_limits(limits)


def told(limits: dict[str, Any]) -> str:
    """Return limits as words."""
    return ", ".join(f"{name}={value:g}" for name, value in limits.items()) or "no limits"
