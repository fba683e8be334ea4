"""`graftwork purge --tenant`: keys, policies, answers and usage go, and are reported place by place."""

import json
import os
import time
from contextlib import closing
from pathlib import Path

import duckdb
import pytest
from typer.testing import CliRunner

from engine.catalog.audit import Audit
from engine.catalog.catalog import Catalog
from engine.ledger.ledger import Spool, open_snapshot
from engine.metering.erasure import erase as erase_usage
from engine.metering.raw_usage import export
from engine.metering.usage_log import UsageLog
from engine.metering.usage_rows import Metered, connect
from engine.settings.params import Params, load_params
from flows.cli import app
from tasks.usage import usage_by
from tests.helpers.kept_adapters import add_policy, keep, settings

SECRET = os.urandom(600).hex()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return settings(tmp_path)


@pytest.fixture
def params(file: Path) -> Params:
    return load_params(file)


@pytest.fixture
def catalog(params: Params) -> Catalog:
    """Tenant `acme` with two policies, one without a revision, and `bobs`; both asked `bobs`' policy."""
    catalog = add_policy(params, "acme-sums", "acme-empty", owner="acme")
    add_policy(params, "bobs-sums", owner="bobs").close()
    keep(params, catalog, "acme-sums", range(3), exported=True)
    keep(params, catalog, "bobs-sums", range(10, 12), exported=True)
    for owner in ("acme", "acme", "bobs"):
        catalog.keys.create(owner, "user")
    *_, acmes, bobs = catalog.keys.all()
    with closing(Spool(params.paths.spool, "test")) as spool:
        # The version before named a key by its hash.
        for name, unit in ((acmes.id, SECRET), (acmes.hash, SECRET), (bobs.id, "fine")):
            id = spool.emit("observations", policy="bobs-sums", key=name, unit=unit)
            spool.emit("feedback", request_id=id, key=name, reward=1.0)
    use(params, {key.owner: key.id for key in catalog.keys.all()})
    return catalog


def use(params: Params, keys: dict[str, str]) -> None:
    """Record requests of each tenant: in Parquet, in the log, and a last one that its gateway leaves open."""
    now = time.time()

    def one(tenant: str) -> Metered:
        id = f"cmpl-{SECRET if tenant == 'acme' else 'fine'}"
        return Metered(id, tenant, keys[tenant], "bobs-sums", "", "user", now, 50)

    with closing(UsageLog(params.paths.usage)) as log:
        for tenant in ("acme",) * 3 + ("bobs",) * 3:
            log.settle(log.admit(one(tenant)), 200, (3, 4))
        log.flush()
        assert export(params.paths.usage, now + 120) == 5
        for tenant in ("bobs", "acme"):
            log.settle(log.admit(one(tenant)), 200, (3, 4))
        log.admit(one("acme"))


def erase(file: Path, tenant: str, *more: str) -> dict:
    given = ["--tenant", tenant, "--by", "ann", "--reason", "they asked", "--json", "--params", str(file)]
    said = CliRunner().invoke(app, ["purge", *given, *more])
    if said.exception and not isinstance(said.exception, SystemExit):
        raise said.exception
    return json.loads(said.output)


@pytest.mark.long
def test_nothing_of_the_tenant_is_left_and_each_place_is_reported(
    file: Path, params: Params, catalog: Catalog
) -> None:
    places = erase(file, "acme", "--yes")["places"]
    assert places["keys"] == {"revoked": 2}
    assert places["policies"] == {"purged": 2}
    assert places["catalog"]["revisions"] == 3
    assert places["files"]["revision_directories"] == 3
    assert (places["answers"]["observations"], places["answers"]["feedback"]) == (2, 2)
    assert places["usage"] == {"requests": 2, "exported": 3}
    assert places["kept"] == {"hourly_sums": 1}
    assert {"name", "sessions", "segments", "store", "cache", "mlflow", "ledger"} <= set(places)
    found = [path for path in params.state_dir.rglob("*") if path.is_file()]
    assert [path for path in found if SECRET.encode() in path.read_bytes()] == []
    assert [policy.name for policy in catalog.policies.page()] == ["bobs-sums"]
    assert len(catalog.revisions.page("bobs-sums")) == 2
    assert [key.owner for key in catalog.keys.all() if key.revoked_at is None] == ["bobs"]
    with open_snapshot(params.paths.ledger_snapshot) as ledger:
        assert ledger.execute("SELECT unit FROM observations").fetchall() == [("fine",)]
    raw = f"SELECT DISTINCT tenant FROM read_parquet('{params.paths.usage}/raw/*/*.parquet')"
    assert duckdb.sql(raw).fetchall() == [("bobs",)]
    with closing(connect(params.paths.usage / "usage.db")) as log:
        assert log.execute("SELECT DISTINCT tenant FROM requests").fetchall() == [("bobs",), ("",)]
    # The bill is as it was.
    assert {row["tenant"]: row["requests"] for row in usage_by(params, "tenant")} == {"acme": 5, "bobs": 4}
    last = Audit(catalog.access).newest(1)[0]
    assert (last.action, last.subject, json.loads(last.after)["by"]) == ("tenant.erase", "acme", "ann")
    assert Audit(catalog.access).verify()[0] == last.id


@pytest.mark.long
def test_a_second_time_finds_nothing(file: Path, catalog: Catalog) -> None:
    erase(file, "acme", "--yes")
    places = erase(file, "acme", "--yes")["places"]
    assert places.pop("kept") == {"hourly_sums": 1}
    assert not any(count for counts in places.values() for count in counts.values())


def test_a_request_under_way_stays_until_it_is_closed(params: Params, catalog: Catalog) -> None:
    asked = Metered("cmpl-1", "acme", "k", "bobs-sums", "", "user", time.time(), 50)
    with closing(UsageLog(params.paths.usage)) as log:
        entry = log.admit(asked)
        for removed in (2, 0):
            # First it is in the journal alone.
            found, kept = erase_usage(params.paths.usage, "acme")
            assert (found["requests"], kept["requests_under_way"]) == (removed, 1)
            log.flush()
        number = entry.row
        log.settle(entry, 200, (3, 4))
        log.flush()
        assert erase_usage(params.paths.usage, "acme")[0]["requests"] == 1
        # The number of the newest row is not given again.
        entry = log.admit(asked)
        log.flush()
        assert entry.row == number + 1


@pytest.mark.parametrize(
    ("tenant", "more", "sentence"),
    [
        ("acme", [], "--yes.*confirm"),
        ("nobody", ["--yes"], "belongs to 'nobody'"),
    ],
)
def test_a_refusal_changes_nothing(
    file: Path, catalog: Catalog, tenant: str, more: list[str], sentence: str
) -> None:
    before = Audit(catalog.access).verify()
    with pytest.raises(Exception, match=sentence):
        erase(file, tenant, *more)
    assert Audit(catalog.access).verify() == before
