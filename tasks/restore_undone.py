"""What a restore undoes: the decisions made since the backup, in sentences for the person who restores.

A backup is the state of its moment. A key that was revoked later is valid in it, a revision that was rolled
back later has no tombstone, and what was purged or erased later is there. The catalog of the installation
that is replaced, where somebody still has it, says which ones.
"""

import time
from collections.abc import Iterator
from pathlib import Path

from engine.catalog.audit import Audit
from engine.catalog.catalog import Catalog
from engine.catalog.records import served_name
from engine.errors import ConfigError, NotFound
from engine.report.why import moment
from tasks.erase import owned_policies
from tasks.outcome import age

# As many of each are named.
NAMED = 20
# What the audit log notes at the end of an erasure, for the usage log and for the ledger.
ERASURES = ("usage.erase", "tenant.erase")


def meaning(name: str, made_at: float, revokes_keys: bool) -> str:
    """Return what it means that a backup is of an earlier moment (epoch seconds)."""
    keys = (
        "Keys are revoked, all of them, as --revoke-all-keys says; but"
        if revokes_keys
        else "Keys that were revoked since then are valid again, unless you give --revoke-all-keys;"
    )
    return (
        f"The backup {name} was finished at {moment(made_at)}, {age(time.time() - made_at)} ago. A restore "
        f"undoes what was decided since then. {keys} revisions that were rolled back have no tombstone and "
        "may be served, and purged policies and erased tenants are back."
    )


def address_of(text: str) -> str:
    """Return the URL of a catalog that is named by its URL, its file, or its state directory."""
    if "://" in text:
        return text
    path = Path(text).expanduser().absolute()
    file = path / "catalog.db" if path.is_dir() else path
    if not file.is_file():
        raise NotFound(
            f"There is no catalog at {file} to compare the backup with. Name the file `catalog.db` of the "
            "installation that is replaced, its state directory, or the URL of its catalog in Postgres."
        )
    return f"sqlite:///{file}"


def find_undone(backup_url: str, present_url: str) -> Iterator[str]:
    """Compare a backup's catalog with the present one of the same installation.

    Yields a line for the present catalog, and one for each kind of which there is something. Raises
    `ConfigError` when they are of two installations, and what `Catalog` raises.
    """
    with Catalog(backup_url) as backup, Catalog(present_url) as present:
        if backup.id != present.id:
            raise ConfigError(
                f"The catalog {present.label} is another installation's than the backup, so it does not know "
                "what was decided since then. Nothing was changed. Name the right one with --compare-with, "
                "or leave it out."
            )
        kinds = {
            "Keys that are no longer in force are valid in the backup": _valid_again(backup, present),
            "Revisions with a tombstone have none in the backup": _without_tombstone(backup, present),
            "Purged policies are in the backup": _purged_since(backup, present),
            "Erased tenants are in the backup": _erased_since(backup, present),
        }
        yield f"Compared with the catalog {present.label}:"
    if not any(kinds.values()):
        yield "  No revoked key, tombstone, purged policy or erased tenant is undone."
    for what, names in kinds.items():
        if names:
            more = f", and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
            yield f"  {what}: {len(names):,} ({', '.join(names[:NAMED])}{more})."


def _valid_again(backup: Catalog, present: Catalog) -> list[str]:
    """Return the keys that are in force in the backup alone: revoked since, or rotated and expired."""
    now = time.time()
    valid = {key.hash for key in present.keys.all() if key.is_in_force(now)}
    again = (key for key in backup.keys.all() if key.is_in_force(now) and key.hash not in valid)
    # A rotated key has two rows of one id.
    return [*dict.fromkeys(f"{key.id} of {key.owner}" for key in again)]


def _without_tombstone(backup: Catalog, present: Catalog) -> list[str]:
    """Return the revisions of the backup that have a tombstone in the present catalog alone."""
    known = {(stone.policy, stone.digest) for stone in backup.tombstones.in_force()}
    return [
        served_name(stone.policy, stone.digest)
        for stone in present.tombstones.in_force()
        if (stone.policy, stone.digest) not in known and backup.revisions.find(stone.policy, stone.digest)
    ]


def _purged_since(backup: Catalog, present: Catalog) -> list[str]:
    """Return the policies of the backup that were purged since, though the name may be in use again."""
    known = backup.purges.marks()
    since = [policy for policy, at in present.purges.marks().items() if known.get(policy) != at]
    return sorted(backup.policies.owners(since))


def _erased_since(backup: Catalog, present: Catalog) -> list[str]:
    """Return the tenants that were erased since, of whom the backup has keys or policies."""
    known = {entry.hash for entry in Audit(backup.access).all_of(ERASURES)}
    since = {entry.subject for entry in Audit(present.access).all_of(ERASURES) if entry.hash not in known}
    owners = {key.owner for key in backup.keys.all()} if since else set()
    return sorted(tenant for tenant in since if tenant in owners or owned_policies(backup, tenant))
