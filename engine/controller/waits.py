"""A line of the table of what a running release waits for."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Wait:
    """A gate, what the release has there and what it needs, for `waited_s` so far.

    In `left_s` of the release's time the wait ends by itself, as `then` says; None: it does not. Neither runs
    while the release is paused.
    """

    gate: str
    has: str
    needs: str
    waited_s: float
    left_s: float | None = None
    then: str = "hold"

    @property
    def ends(self) -> str:
        """When and how the wait ends by itself, or an empty string."""
        return "" if self.left_s is None else f"{self.then} in {max(0.0, self.left_s):.0f} s"

    def row(self) -> dict[str, Any]:
        """Return the line for JSON."""
        return asdict(self) | {"ends": self.ends}
