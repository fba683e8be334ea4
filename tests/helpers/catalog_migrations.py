"""A catalog at an older schema version."""

from pathlib import Path

from alembic import command
from alembic.config import Config

import engine.catalog.catalog as catalog_module
from engine.catalog.database import open_engine

MIGRATIONS = Path(catalog_module.__file__).parent / "migrations"


def upgrade_to(url: str, version: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with open_engine(url).execution_options(write=True).begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, version)
