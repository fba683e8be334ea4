"""The errors for names that a catalog does not have."""

from collections.abc import Sequence

from engine.catalog.access import CatalogPart
from engine.errors import NotFound
from engine.settings.params import DIGEST12


class UnknownNames(CatalogPart):
    """Errors that say what is missing; `suggestions.Suggestions` also names what is near."""

    def unknown(self, policy: str) -> NotFound:
        """Return the error for an unknown policy."""
        return NotFound(f"There is no policy {policy!r} in the catalog.")

    def missing(self, policy: str, digest_prefix: str, patterns: Sequence[str] = ()) -> NotFound:
        """Return the error for an unknown revision, which names only policies that `patterns` cover."""
        return NotFound(f"Policy {policy!r} has no revision {digest_prefix[:DIGEST12]!r} in the catalog.")
