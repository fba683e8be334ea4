"""Catalog rows that several tests begin with."""

from dataclasses import replace

from engine.adapters.catalog import Catalog, Policy, Revision

OLD, NEW, THIRD = "aa" * 32, "bb" * 32, "cc" * 32
ACCEPTED = {"accepted": True, "reason": "It reproduces."}


def fill(catalog: Catalog, champion: str | None = OLD) -> None:
    """One policy with three verified revisions, the first of which may be the champion."""
    catalog.add_policy(Policy("sorting", "base", {"suite": "sorting-json"}, "me", 1.0))
    for digest in (OLD, NEW, THIRD):
        row = Revision("sorting", digest, "base", None, 1, 8, 64, "l", "s", 0, 64, "c", "exported", "me", 1.0)
        catalog.add_revision(row)
        catalog.set_probe("sorting", digest, ACCEPTED)
    if champion:
        catalog.set_route(replace(catalog.route("sorting"), champion=champion), 0)
