"""A catalog at an older schema version."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import make_url

import engine.catalog.catalog as catalog_module
from engine.catalog.access import open_engine

MIGRATIONS = Path(catalog_module.__file__).parent / "migrations"


def upgrade_to(url: str, version: str) -> None:
    if (database := make_url(url).database) and url.startswith("sqlite"):
        Path(database).parent.mkdir(parents=True, exist_ok=True)
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with open_engine(url).execution_options(write=True).begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, version)
