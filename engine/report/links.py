"""A link of the chain that explains an answer or a revision."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Link:
    """One link: `says` is a sentence for people, `facts` the same as data."""

    name: str
    known: bool
    says: str
    facts: Mapping[str, Any] = field(default_factory=dict)
