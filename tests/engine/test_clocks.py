"""A clock that jumps ahead ends nothing early, and one that is set back is believed at once."""

from pathlib import Path

import pytest

from engine.catalog.catalog import Catalog, migrate
from engine.clocks import HELD_S, JUMP_S, SteadyClock

DAY_S = 86_400.0


class Times:
    """A wall clock and a monotonic one."""

    def __init__(self) -> None:
        self.wall, self.steady = 1e9, 100.0
        self.clock = SteadyClock(lambda: self.wall, lambda: self.steady)

    def passes(self, seconds: float) -> float:
        self.wall += seconds
        self.steady += seconds
        return self.clock()


def test_a_jump_is_not_believed_until_it_has_held_for_an_hour() -> None:
    times = Times()
    assert times.passes(10) == 1e9 + 10
    times.wall += 2 * DAY_S
    assert times.passes(5) == 1e9 + 15
    assert times.passes(HELD_S - 1) == 1e9 + 15 + HELD_S - 1
    assert times.passes(2) == 1e9 + 2 * DAY_S + 15 + HELD_S + 1


def test_a_clock_that_is_corrected_is_right_at_once() -> None:
    times = Times()
    times.wall += 2 * DAY_S
    assert times.passes(5) == 1e9 + 5
    times.wall -= 2 * DAY_S
    assert times.passes(5) == 1e9 + 10
    times.wall -= DAY_S
    assert times.passes(5) == 1e9 + 15 - DAY_S


def test_a_slewed_clock_is_followed() -> None:
    times = Times()
    for _ in range(100):
        times.wall += JUMP_S / 2
        assert times.passes(60) == times.wall


def test_no_key_expires_by_a_clock_that_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/catalog.db"
    migrate(url)
    times = Times()
    with Catalog(url) as catalog:
        monkeypatch.setattr(catalog.keys, "now", times.clock)
        key = catalog.keys.create("acme", "user", expires_at=times.wall + DAY_S)
        times.wall += 2 * DAY_S
        assert catalog.keys.find(key)
        # A whole day later it does.
        times.passes(DAY_S + 1)
        assert catalog.keys.find(key) is None
