"""Controllers of two versions on one ledger, one after the other, as an upgrade and a rollback have them."""

import re
from pathlib import Path

from engine.ledger.ledger import MIGRATIONS, Ledger, Spool
from engine.ledger.purge import of_policy, remove
from tests.engine.ledger.test_ledger import rows, schema_of, take_in
from tests.helpers.history import step_row


def test_an_older_version_goes_on_with_a_ledger_that_a_newer_one_only_added_to(
    tmp_path: Path,
) -> None:
    """As the controller after `helm rollback`, beside engines of the newer version."""
    spool, ledger = Spool(tmp_path / "spool", "test"), Ledger(tmp_path / "ledger.duckdb")
    ledger.connection.execute("ALTER TABLE train_steps ADD COLUMN of_the_newer DOUBLE")
    ledger.connection.execute('CREATE TABLE its_own (id VARCHAR PRIMARY KEY, "at" DOUBLE, policy VARCHAR)')
    ledger.connection.execute('INSERT INTO migrations (version, "at") VALUES (9999, 0)')
    before = schema_of(ledger)
    ledger.close()
    older = Ledger(tmp_path / "ledger.duckdb")
    spool.emit("train_steps", **step_row(1, "p") | {"of_the_newer": 0.25})
    spool.emit("train_steps", **step_row(2, "p"))
    spool.emit("its_own", policy="q")
    assert take_in(older, spool) == 3
    assert not (spool.root / "rejected").exists()
    copy = tmp_path / "copy.duckdb"
    older.snapshot(copy)
    assert remove(older, copy, of_policy(older.path, "q"))["its_own"] == 1
    assert rows(older, "SELECT step, of_the_newer FROM train_steps ORDER BY step") == [(1, 0.25), (2, None)]
    assert schema_of(older) == before
    older.close()


def test_a_migration_of_the_ledger_only_adds_so_that_the_version_before_goes_on() -> None:
    for file in MIGRATIONS.glob("*.sql"):
        for statement in re.sub("--.*", "", file.read_text()).split(";"):
            assert only_adds(statement.strip()), (file.name, statement)
    assert not any(map(only_adds, HARMS))


HARMS = (
    "DROP VIEW quality",
    "ALTER TABLE scores DROP COLUMN item",
    "ALTER TABLE scores ADD COLUMN kind VARCHAR NOT NULL",
    "UPDATE scores SET score = 0",
    "CREATE OR REPLACE VIEW rated AS FROM feedback",
)


def only_adds(statement: str) -> bool:
    added = r"CREATE (TABLE|VIEW|INDEX) .*|INSERT INTO .*|ALTER TABLE \w+ ADD COLUMN (?!.*NOT NULL).*"
    return not statement or bool(re.fullmatch(added, statement, re.DOTALL))
