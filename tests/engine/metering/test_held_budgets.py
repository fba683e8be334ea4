"""What a gateway holds of budgets: it goes back when it is idle, and a limit that changes counts at once."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from engine.errors import LimitReached
from engine.metering import usage_rows
from engine.metering.usage_log import UsageLog
from engine.metering.usage_rows import DAY, MONTH, Budget, Metered, connect, periods

NOON = 1_790_000_000.0
DAY_OF_NOON = periods(NOON)[0]


def asked(reserved: int, at: float = NOON) -> Metered:
    return Metered("r", "acme", "k", "acme-sums", "", "user", at, reserved)


def acme(tokens: float) -> list[Budget]:
    return [Budget("tenant:acme", DAY, tokens)]


def counted(root: Path) -> tuple[int, int]:
    """Return the tokens of today that were used, and those that gateways hold."""
    with closing(connect(root / "usage.db")) as connection:
        query = "SELECT used, reserved FROM spent WHERE subject = 'tenant:acme' AND period = ?"
        used, reserved = connection.execute(query, (DAY_OF_NOON,)).fetchone()
        held = connection.execute(
            "SELECT total(tokens) FROM held WHERE period = ?", (DAY_OF_NOON,)
        ).fetchone()
    assert held == (reserved,)
    return used, reserved


@pytest.fixture
def log(tmp_path: Path) -> Iterator[UsageLog]:
    with closing(UsageLog(tmp_path)) as opened:
        yield opened


def test_a_share_is_drawn_once_for_many_requests(
    log: UsageLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = Mock(side_effect=usage_rows.begin)
    monkeypatch.setattr(usage_rows, "begin", begun)
    for _ in range(100):
        log.settle(log.admit(asked(10), acme(16_000)), 200, (5, 5))
    assert begun.call_count == 1
    log.flush()
    assert counted(tmp_path) == (1000, 0)


def test_what_is_idle_goes_back_and_what_is_under_way_stays(
    log: UsageLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.settle(log.admit(asked(100), acme(16_000)), 200, (1, 1))
    log.flush()
    assert counted(tmp_path) == (2, 998)
    entry = log.admit(asked(100), acme(16_000))
    monkeypatch.setattr(usage_rows, "IDLE_S", 0.0)
    log.flush()
    assert counted(tmp_path) == (2, 998)
    log.settle(entry, 200, (1, 1))
    log.flush()
    assert counted(tmp_path) == (4, 0)
    # Nothing is left in memory either: the next request draws anew.
    log.admit(asked(100), acme(16_000))
    log.flush()
    assert counted(tmp_path) == (4, (16_000 - 4) // 16)


def test_a_limit_that_is_lowered_counts_at_once(log: UsageLog, tmp_path: Path) -> None:
    log.settle(log.admit(asked(100), acme(16_000)), 200, (50, 50))
    with pytest.raises(LimitReached, match="has 0 of 100 tokens"):
        log.admit(asked(1), acme(100))
    log.admit(asked(1), acme(101))
    log.flush()
    assert counted(tmp_path) == (100, 1)


def test_a_request_that_one_of_its_budgets_refuses_takes_nothing_of_the_others(
    log: UsageLog, tmp_path: Path
) -> None:
    key = Budget("key:k", MONTH, 10)
    with pytest.raises(LimitReached, match="key 'k'"):
        log.admit(asked(11), [*acme(16), key])
    assert counted(tmp_path)[0] == 0
    log.admit(asked(16), acme(16))


def test_what_another_gateway_has_not_used_is_not_refused_for_long(
    log: UsageLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(UsageLog(tmp_path)) as other:
        log.settle(log.admit(asked(10), acme(160)), 200, (1, 0))
        log.flush()
        # It holds 9, and nobody else may have them.
        with pytest.raises(LimitReached, match="150 of 160"):
            other.admit(asked(151), acme(160))
        monkeypatch.setattr(usage_rows, "IDLE_S", 0.0)
        log.flush()
        other.admit(asked(159), acme(160))
