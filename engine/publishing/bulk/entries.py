"""Entries of a bulk registration, and their admission by everything but their values.

Findings are cached by shapes and by policy, so that a million entries of few kinds cost little each.
"""

import re
from collections.abc import Callable, Collection
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from engine.catalog.policies import taken
from engine.errors import AdapterError
from engine.publishing.bulk.batches import BatchForm, form_of
from engine.settings.params import POLICY_NAME

if TYPE_CHECKING:
    from engine.adapters.revision import Tensors
    from engine.base.families import BaseShapes
    from engine.catalog.catalog import Catalog

# Sizes of the caches: an endless iterator may bring ever new shapes and policies.
FORMS, POLICIES = 256, 100_000
DIGEST = re.compile(r"[0-9a-f]{64}")
SHAPE, DTYPE = attrgetter("shape"), attrgetter("dtype")
InOrder = Callable[[Any], tuple[Tensor, ...]]
Thing = TypeVar("Thing")
Name = TypeVar("Name")


class Entry(NamedTuple):
    """An adapter to register: canonical tensors in serving dtype, alpha equal to rank.

    Each entry has tensors of its own, which do not change until it is registered.
    """

    policy: str
    tensors: "Tensors"
    parent: str | None = None
    step: int = 0


class Registered(NamedTuple):
    """The result for the entry at `position` of the iterator: its digest, or why it was `refused`.

    A revision that the policy already had is not `new`.
    """

    position: int
    policy: str
    digest: str | None
    new: bool
    refused: str | None = None


class BulkRow(NamedTuple):
    """An admitted entry without its tensors."""

    position: int
    policy: str
    parent: str | None
    step: int


def refusal(row: BulkRow, reason: str) -> Registered:
    """Return the result for a refused entry."""
    return Registered(row.position, row.policy, None, False, reason)


def purged(policy: str) -> str:
    """Return the reason for refusing an entry of a purged policy."""
    return f"Policy {policy!r} was purged. Create it again to register it."


class BulkAdmission:
    """Decides which entries can be registered, by everything but their values."""

    def __init__(
        self, catalog: "Catalog", base: "BaseShapes", base_digest: str, owner: str, dtype: torch.dtype
    ):
        self._catalog = catalog
        self._base, self._base_digest, self._modules = base, base_digest, base.modules()
        self._owner, self._dtype = owner, dtype
        # Shapes -> their form, or why they are refused; a policy -> why it is refused, or None.
        self._forms: dict[object, BatchForm | str] = {}
        self._policies: dict[str, str | None] = {}
        # An entry's names -> the sorted names, and a getter of the tensors in that order.
        self._orders: dict[tuple[str, ...], tuple[tuple[str, ...], InOrder]] = {}

    def admit(self, entry: Entry) -> tuple[BatchForm, tuple[Tensor, ...]]:
        """Return an entry's form, and its tensors in the form's order; `AdapterError` when it is unfit."""
        if fault := self._fault(entry):
            raise AdapterError(fault)
        try:
            names = tuple(entry.tensors)
            keys, in_order = self._orders.get(names) or self._order(names)
            tensors = in_order(entry.tensors)
            shapes = keys, tuple(map(SHAPE, tensors)), tuple(map(DTYPE, tensors))
        except (TypeError, AttributeError):
            raise AdapterError("The entry's tensors must be a dict of tensors by their names.") from None
        form = self._forms.get(shapes)
        if form is None:
            form = _remember(self._forms, shapes, self._form(entry.tensors), FORMS)
        if isinstance(form, str):
            raise AdapterError(form)
        return form, tensors

    def _order(self, names: tuple[str, ...]) -> tuple[tuple[str, ...], InOrder]:
        keys = tuple(sorted(names))
        # With fewer names than two, `itemgetter` returns no tuple.
        in_order = itemgetter(*keys) if len(keys) > 1 else lambda tensors: tuple(map(tensors.get, keys))
        return _remember(self._orders, names, (keys, in_order), FORMS)

    def _form(self, tensors: "Tensors") -> BatchForm | str:
        try:
            return form_of(tensors, self._base, self._modules, self._base_digest, self._dtype)
        except AdapterError as error:
            return str(error)

    def _fault(self, entry: Entry) -> str | None:
        policy, _, parent, step = entry
        if parent is not None and not (isinstance(parent, str) and DIGEST.fullmatch(parent)):
            return f"The parent {str(parent)[:80]!r} is not a digest of 64 hex digits."
        if type(step) is not int or not 0 <= step < 1 << 31:
            return f"The step {str(step)[:80]} is not a step number, a whole number from 0."
        if not isinstance(policy, str):
            return f"{str(policy)[:80]!r} is not a policy name."
        # `faults` checks new policies together: a query for each would take as long as all the rest.
        return self._policies.get(policy)

    def faults(self, policies: Collection[str]) -> dict[str, str]:
        """Return why entries of these policies are refused, by policy; policies in order are left out."""
        unknown = [name for name in policies if name not in self._policies]
        found = {name: self._policies[name] for name in policies if name in self._policies}
        owners = self._catalog.policies.owners(unknown) if unknown else {}
        for name in unknown:
            fault = self._fault_of_policy(name, owners.get(name))
            found[name] = _remember(self._policies, name, fault, POLICIES)
        return {name: fault for name, fault in found.items() if fault}

    def _fault_of_policy(self, name: str, known: tuple[str, str] | None) -> str | None:
        if not POLICY_NAME.fullmatch(name):
            return f"{name[:80]!r} is not a policy name."
        if known is None:
            if self._catalog.purges.find(name):
                return purged(name)
            return f"There is no policy {name!r} in the catalog. Add it first."
        return taken(name, known, (self._owner, self._base_digest))


def _remember(known: dict[Name, Thing], name: Name, thing: Thing, most: int) -> Thing:
    if len(known) >= most:
        known.clear()
    known[name] = thing
    return thing
