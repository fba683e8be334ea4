"""`graftwork migrate`, and who else migrates a catalog that several machines share."""

import json
from pathlib import Path

import pytest
import sqlalchemy as sa

from engine.catalog.access import open_engine
from engine.catalog.opening import open_catalog
from engine.catalog.records import OLDEST_SCHEMA, SCHEMA_VERSION
from engine.errors import ConfigError
from engine.services import lifecycle
from engine.settings.params import Params
from tests.helpers.command_line import graftwork
from tests.helpers.own_ports import own_ports
from tests.helpers.postgres import fresh_database
from tests.helpers.state_of_265b009 import leave_catalog_of_265b009


def test_the_command_migrates_once_and_leaves_a_newer_schema(empty_catalog_url: str, tmp_path: Path) -> None:
    leave_catalog_of_265b009(empty_catalog_url)
    settings = tmp_path / "params.yaml"
    settings.write_text(f"state_dir: {tmp_path / 'state'}\ncatalog: {{url: '{empty_catalog_url}'}}\n")
    for _ in range(2):
        done = graftwork("migrate", "--json", "--params", str(settings))
        assert (done.returncode, json.loads(done.stdout)["schema"]) == (0, SCHEMA_VERSION), done.stderr
    engine = open_engine(empty_catalog_url)
    with engine.execution_options(write=True).begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '0999'"))
    engine.dispose()
    assert "has schema 0999" in graftwork("migrate", "--params", str(settings)).stdout
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("only", [("engine",), ("engine", "controller")])
def test_up_migrates_a_shared_catalog_where_it_starts_the_controller(
    only: tuple[str, ...], postgres_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its engine starts, which would refuse; a machine of engines leaves it to the controller's."""
    url = fresh_database(postgres_server)
    leave_catalog_of_265b009(url)
    params = own_ports(state_dir=tmp_path / "state", catalog={"url": url})

    def look(params: Params, *_: object) -> None:
        open_catalog(params.paths, migrated=True).close()
        raise InterruptedError

    monkeypatch.setattr(lifecycle, "_start_programs", look)
    monkeypatch.setattr(lifecycle, "check_base", lambda *_: None)
    refused = pytest.raises(ConfigError, match=f"schema {OLDEST_SCHEMA}.*graftwork migrate")
    with refused if only == ("engine",) else pytest.raises(InterruptedError):
        lifecycle.start(params, lambda: None, lambda *_: None, None, only)
