"""API keys. A key's plaintext is returned once, when it is created; only its sha256 is stored."""

import hashlib
import secrets
import time
from pathlib import Path

from sqlalchemy import select, update

from engine.catalog import tables
from engine.catalog.access import Access
from engine.catalog.changes import tell
from engine.catalog.records import Key
from engine.errors import ConfigError, Conflict, NotFound
from engine.files import replacing

SCOPES = ("admin", "user", "score")


class Keys:
    """The catalog's keys; `catalog.keys`."""

    def __init__(self, access: Access):
        self._access = access

    def create(self, owner: str, scope: str) -> str:
        """Return a new key's plaintext; `ConfigError` for an unknown scope."""
        if scope not in SCOPES:
            raise ConfigError(f"A key's scope is one of {', '.join(SCOPES)}, not {scope!r}.")
        plaintext = f"gw-{secrets.token_hex(20)}"
        key = Key(hash_key(plaintext), owner, scope, time.time())
        with self._access.write() as connection:
            connection.execute(self._access.new(tables.keys, key))
            tell(connection, None)
        return plaintext

    def ensure_local(self, path: Path) -> str:
        """Return the installation's own admin key, kept in `path` for its owner only.

        A key that was revoked, or belongs to another catalog, is replaced.
        """
        if path.is_file():
            plaintext = path.read_text().strip()
            if self.find(plaintext):
                return plaintext
        plaintext = self.create("local", "admin")
        with replacing(path) as draft:
            draft.touch(mode=0o600)
            draft.write_text(plaintext + "\n")
        return plaintext

    def all(self) -> list[Key]:
        """Return the keys, revoked ones too, oldest first."""
        return self._access.all(Key, select(tables.keys).order_by(tables.keys.c.created_at))

    def find(self, plaintext: str) -> Key | None:
        """Return the key in force with this plaintext; None when there is none."""
        table = tables.keys.c
        query = select(tables.keys).where(table.hash == hash_key(plaintext), table.revoked_at.is_(None))
        return self._access.one(Key, query)

    def revoke(self, prefix: str) -> Key:
        """Revoke the one key whose hash starts with `prefix`, or whose plaintext it is.

        Raises `NotFound` when there is none, `Conflict` when there are several.
        """
        wanted = hash_key(prefix) if prefix.startswith("gw-") else prefix
        found = [key for key in self.all() if key.hash.startswith(wanted) and key.revoked_at is None]
        if not found:
            raise NotFound(f"No key in force begins with {prefix[:12]!r}. `graftwork key ls` lists them.")
        if len(found) > 1:
            raise Conflict(f"{len(found)} keys begin with {prefix!r}; give more of its characters.")
        table = tables.keys.c
        with self._access.write() as connection:
            change = update(tables.keys).where(table.hash == found[0].hash)
            connection.execute(change.values(revoked_at=time.time()))
            tell(connection, None)
        return found[0]


def hash_key(plaintext: str) -> str:
    """Return the sha256 of a key's plaintext, in hex."""
    return hashlib.sha256(plaintext.encode()).hexdigest()
