"""Prefect's server as we run it."""

from pathlib import Path

import pytest
from prefect.server.database import configurations

from tasks.prefect_server import CONNECTIONS, widen_pool


async def test_who_waits_for_the_writer_leaves_connections_for_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configurations, "create_async_engine", configurations.create_async_engine)
    widen_pool()
    database = configurations.AioSqliteConfiguration(f"sqlite+aiosqlite:///{tmp_path}/prefect.db")
    engine = await database.engine()
    async with engine.connect(), engine.connect():
        assert engine.pool.size() == CONNECTIONS  # type: ignore[attr-defined]
    await engine.dispose()
