"""Catalog rows that several tests begin with."""

from dataclasses import replace

from engine.catalog.catalog import Catalog, Policy, Release, Revision

OLD, NEW, THIRD = "aa" * 32, "bb" * 32, "cc" * 32
ACCEPTED = {"accepted": True, "reason": "It reproduces."}


def fill(catalog: Catalog, champion: str | None = OLD) -> None:
    """One policy with three verified revisions, the first of which may be the champion."""
    catalog.policies.add(Policy("sorting", "base", {"suite": "sorting-json"}, "me", 1.0))
    for digest in (OLD, NEW, THIRD):
        row = Revision(
            "sorting", digest, "base", None, 1, 8, 64, "l", "s", 0, 64, "cc", "exported", "me", 1.0
        )
        catalog.revisions.add_many([row])
        catalog.revisions.set_probe("sorting", digest, ACCEPTED)
    if champion:
        catalog.routes.update(replace(catalog.routes.get("sorting"), champion=champion), 0)


def make_revision(digest: str, **changes: object) -> Revision:
    row = Revision(
        policy="sorting",
        digest=digest,
        base="base",
        parent=None,
        step=1,
        rank=8,
        bytes=64,
        layout="layout",
        segment="s1",
        offset=0,
        length=64,
        checksum="cc",
        state="snapshot",
        owner="me",
        created_at=1.0,
        expires_at=10.0,
    )
    return replace(row, **changes)


def make_release(id: str, digest: str = "aa", policy: str = "sorting") -> Release:
    return Release(id, policy, digest, None, "probe", 0.2, "running", {"alpha": 0.05}, 1.0, 1.0)
