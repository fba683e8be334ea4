"""Find and remove a policy's stored sessions: adapter, Adam moments and training history.

Outside a trainer, a session counts as open when its state was written within the lease. A running trainer
knows the leases themselves (`Sessions.delete`).
"""

import re
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from engine.errors import Conflict, ServiceError
from engine.settings.params import DIGEST12
from engine.training.service import state
from engine.training.service.session import state_file

LEASE_S = 30.0
GONE = ".purged-"


def stored_sessions(directory: Path, policy: str) -> Iterator[Path]:
    """Yield the directories of a policy's sessions; a damaged one is recognised by its name."""
    line = re.compile(rf"{re.escape(policy)}-[0-9a-f]{{{DIGEST12}}}")
    for folder in directory.iterdir() if directory.is_dir() else ():
        if folder.is_dir() and not folder.name.startswith("."):
            owner = _policy_of(folder)
            if owner == policy or (owner is None and line.fullmatch(folder.name)):
                yield folder


def _policy_of(folder: Path) -> str | None:
    file = state_file(folder)
    return state.policy_of(file) if file.is_file() else None


def refuse_open(directory: Path, policy: str) -> list[Path]:
    """Return a policy's stored sessions; `Conflict` when one of them was written within the lease."""
    folders = list(stored_sessions(directory, policy))
    for folder in folders:
        file = state_file(folder)
        if file.is_file() and time.time() - file.stat().st_mtime < LEASE_S:
            raise Conflict(open_sentence(policy, folder.name))
    return folders


def remove_sessions(directory: Path, policy: str) -> dict[str, int]:
    """Remove a policy's sessions crash-safely and return their number and bytes.

    Raises `Conflict` when a session was written within the lease; then nothing is removed. Raises
    `ServiceError` with the paths that could not be removed.
    """
    gone = [_hidden(folder) for folder in refuse_open(directory, policy)]
    removed = sum(file.stat().st_size for folder in gone for file in folder.rglob("*") if file.is_file())
    # Directories that a killed removal left behind are removed too.
    hidden = [folder for folder in directory.glob(f"{GONE}*") if folder.is_dir()]
    for folder in hidden:
        shutil.rmtree(folder, ignore_errors=True)
    if left := [str(folder) for folder in hidden if folder.exists()]:
        raise _stays(", ".join(left), "not everything in them may be deleted")
    return {"sessions": len(gone), "bytes": removed}


def _hidden(folder: Path) -> Path:
    """Rename a session's directory so that it no longer counts as a session."""
    try:
        return folder.rename(folder.with_name(f"{GONE}{folder.name}-{uuid.uuid4().hex}"))
    except OSError as error:
        raise _stays(str(folder), str(error.strerror)) from None


def _stays(what: str, reason: str) -> ServiceError:
    return ServiceError(
        f"Could not remove {what}: {reason}. Make it writable or remove it, then run the purge again."
    )


def open_sentence(policy: str, session: str, holder: str | None = None) -> str:
    """Return why a policy cannot be purged now, and what to do."""
    whose = f" by {holder!r}" if holder else ""
    return (
        f"The session {session!r} of {policy!r} is open{whose}. Let its training end, or stop it (Ctrl-C, "
        f"or Cancel in Prefect's UI); {LEASE_S:.0f} s after its last call it counts as closed."
    )
