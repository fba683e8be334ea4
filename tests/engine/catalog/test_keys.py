"""Keys and tenants: roles, patterns that never overlap, rotation, and the keys of an older catalog."""

import hmac
import time
from contextlib import closing
from pathlib import Path

import pytest

from engine.catalog.catalog import Catalog, Policy, Tenant, migrate
from engine.catalog.keys import SCOPES, as_tinkers
from engine.catalog.records import covers, overlap
from engine.errors import ConfigError, Conflict, NotFound
from engine.serving.gateway.routing import KeyedHash


def test_roles_come_by_name_or_by_scope(catalog: Catalog) -> None:
    for given, roles in (*SCOPES.items(), (["pin", "infer"], ("infer", "pin"))):
        key = catalog.keys.find(catalog.keys.create("me", given))
        assert key is not None
        assert tuple(key.roles) == roles
    for wrong in ("root", ["infer", "root"], []):
        with pytest.raises(ConfigError, match=r"roles.*infer, pin"):
            catalog.keys.create("me", wrong)


def test_an_admin_has_every_role(catalog: Catalog) -> None:
    key = catalog.keys.find(catalog.keys.create("me", "admin"))
    assert key is not None
    assert key.may("score")
    assert key.may("metrics")


@pytest.mark.parametrize(
    ("pattern", "name", "is_covered"),
    [("acme-*", "acme-sums", True), ("acme-*", "acme-", True), ("acme-*", "acme", False),
     ("acme", "acme", True), ("acme", "acme-sums", False)],
)  # fmt: skip
def test_patterns(pattern: str, name: str, is_covered: bool) -> None:
    assert covers(pattern, name) == is_covered


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [("acme-*", "acme-sums", True), ("acme-*", "ac*", True), ("acme-*", "acme-b*", True),
     ("acme-a*", "acme-b*", False), ("acme", "acme", True), ("acme", "acme-*", False),
     ("acme", "umbrella", False)],
)  # fmt: skip
def test_overlaps(one: str, other: str, both: bool) -> None:
    assert overlap(one, other) == overlap(other, one) == both


def test_policies_of_two_tenants_never_overlap(catalog: Catalog) -> None:
    keys = catalog.keys
    keys.create("acme", "user", ["acme-*"])
    keys.create("acme", "score", ["acme-sums"])
    with pytest.raises(Conflict, match=r"'acme-s\*'.*'acme'"):
        keys.create("umbrella", "user", ["umbrella-*", "acme-s*"])
    mine = keys.find(keys.create("umbrella", "user", ["umbrella-*"]))
    with pytest.raises(Conflict, match="every policy"):
        keys.create("initech", "user")
    with pytest.raises(Conflict, match="overlaps"):
        keys.limit(mine.id, {}, ["acme-*"])
    # The installation's own admins reach everything.
    keys.create("local", "admin")
    with pytest.raises(ConfigError, match=r"'\*-sums'"):
        keys.create("acme", "user", ["*-sums"])
    for key in keys.all():
        if key.owner == "acme":
            keys.revoke(key.hash)
    keys.create("umbrella", "user", ["acme-*"])


def test_patterns_stay_their_tenants_after_its_keys_have_expired(catalog: Catalog) -> None:
    keys, expired = catalog.keys, time.time() - 1
    keys.create("acme", "user", ["acme-*"], expires_at=expired)
    keys.create("umbrella", "user", ["umbrella-*"])
    for pattern in ("acme-*", "acme-sums", "a*"):
        with pytest.raises(Conflict, match="acme"):
            keys.create("umbrella", "user", [pattern])
    with pytest.raises(Conflict, match="acme"):
        catalog.policies.add(Policy("acme-new", "base", {}, "umbrella", 1.0))
    # Its tenant renews.
    keys.create("acme", "user", ["acme-*"])


def test_patterns_never_cover_what_another_tenant_owns(catalog: Catalog) -> None:
    keys = catalog.keys
    only = keys.find(keys.create("acme", "user", ["acme-*"]))
    catalog.policies.add(Policy("acme-sums", "base", {}, "acme", 1.0))
    keys.revoke(only.hash)
    mine = keys.find(keys.create("umbrella", "user", ["umbrella-*"]))
    for pattern in ("acme-*", "acme-sums", "acme-s*"):
        with pytest.raises(Conflict, match=r"'acme-sums' of tenant 'acme'"):
            keys.create("umbrella", "user", [pattern])
        with pytest.raises(Conflict, match="'acme-sums'"):
            keys.limit(mine.id, {}, [pattern])
    # "me" has no key, so it is no tenant: its policy may be given to one.
    keys.create("umbrella", "user", ["sorting"])


def test_a_free_key_that_expired_stands_in_nobodys_way(catalog: Catalog) -> None:
    catalog.keys.create("old", "user", expires_at=time.time() - 1)
    catalog.keys.create("acme", "user", ["acme-*"])


def test_a_key_without_policies_stands_in_the_way_of_tenants(catalog: Catalog) -> None:
    free = catalog.keys.find(catalog.keys.create("old", "user"))
    with pytest.raises(Conflict, match=f"{free.id}.*every policy"):
        catalog.keys.create("acme", "user", ["acme-*"])
    catalog.keys.limit(free.id, {}, ["old-*"])
    catalog.keys.create("acme", "user", ["acme-*"])


def test_a_rotated_key_keeps_its_id_and_limits(catalog: Catalog) -> None:
    first = catalog.keys.create("acme", "user", ["acme-*"], {"tokens_per_day": 5.0})
    before = catalog.keys.find(first)
    second = catalog.keys.rotate(before.id, overlap_s=3600)
    after = catalog.keys.find(second)
    assert (after.id, after.roles, after.policies, after.limits) == (
        before.id, before.roles, before.policies, before.limits,
    )  # fmt: skip
    assert after.hash != before.hash
    assert 3500 < catalog.keys.find(first).expires_at - time.time() <= 3600
    third = catalog.keys.rotate(before.id, overlap_s=0)
    assert [catalog.keys.find(key) is None for key in (first, second, third)] == [True, True, False]
    catalog.keys.revoke(before.id)
    assert catalog.keys.find(third) is None
    with pytest.raises(NotFound):
        catalog.keys.rotate(before.id, 0)


def test_limits(catalog: Catalog) -> None:
    key = catalog.keys.find(catalog.keys.create("acme", "user"))
    assert catalog.keys.limit(key.id, {"concurrency": 3.0}).limits == {"concurrency": 3.0}
    assert catalog.keys.tenant("acme") == Tenant("acme")
    for limits in ({"tokens_per_month": 9.0}, {"load_share": 0.5}):
        catalog.keys.set_tenant(Tenant("acme", limits, 2.0))
        assert catalog.keys.tenant("acme") == Tenant("acme", limits, 2.0)
    for wrong in ({"tokens": 1.0}, {"concurrency": -1.0}, {"load_share": 2.0}):
        with pytest.raises(ConfigError, match="not a limit"):
            catalog.keys.limit(key.id, wrong)
    with pytest.raises(ConfigError, match="weight"):
        catalog.keys.set_tenant(Tenant("acme", {}, 0.0))


def test_a_keyed_hash_is_of_one_installation(catalog: Catalog, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/another.db"
    migrate(url)
    with closing(Catalog(url)) as other:
        ours, theirs = KeyedHash(catalog.secret), KeyedHash(other.secret)
        assert ours("a", "b") == ours("a", "b") == hmac.digest(catalog.secret, b"a\0b", "sha256").hex()[:24]
        assert ours("a", "b") != ours("ab")
        assert theirs("a", "b") != ours("a", "b")


def test_a_key_may_be_written_as_tinkers_sdk_wants_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'catalog.db'}"
    migrate(url)
    with closing(Catalog(url)) as catalog:
        plaintext = catalog.keys.create("acme", "tinker", ["acme-*"])
        written = as_tinkers(plaintext)
        assert written == f"tml-{plaintext.removeprefix('gw-')}"
        found = catalog.keys.find(written)
        assert found == catalog.keys.find(plaintext)
        assert found
        assert found.roles == ["infer", "pin", "train"]
        assert catalog.keys.find(f"tml-{'0' * 40}") is None
        rotated = catalog.keys.rotate(written, 0.0)
        assert catalog.keys.find(as_tinkers(rotated))
        catalog.keys.revoke(as_tinkers(rotated))
        assert catalog.keys.find(as_tinkers(rotated)) is None
