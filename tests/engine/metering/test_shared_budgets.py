"""Budgets that machines share: no more is drawn, and what one machine does not need comes back."""

import random
import threading
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import select

from engine.catalog import tables
from engine.catalog.access import Access
from engine.errors import LimitReached
from engine.metering.shared_budgets import SharedBudgets
from engine.metering.usage_log import UsageEntry, UsageLog
from engine.metering.usage_rows import DAY, Budget, Metered, Shortage, periods

NOON = 1_790_000_000.0
BUDGET = Budget("tenant:acme", DAY, 20_000)


def asked(reserved: int) -> Metered:
    return Metered("r", "acme", "k", "acme-sums", "", "user", NOON, reserved)


class Machine:
    """A gateway on a machine of its own."""

    def __init__(self, root: Path, url: str):
        self.log = UsageLog(root, SharedBudgets(url))
        self.used = 0

    def admit(self, reserved: int) -> UsageEntry | None:
        """Reserve as the gateway does; None when it is refused."""
        while True:
            try:
                return self.log.admit(asked(reserved), [BUDGET])
            except Shortage as short:
                if not self.log.upkeep.draw(short):
                    return None

    def spend(self, reserved: int, tokens: int) -> bool:
        entry = self.admit(reserved)
        if entry is None:
            return False
        self.log.settle(entry, 200, (0, tokens))
        self.used += tokens
        return True

    def close(self) -> None:
        self.log.close()
        assert self.log.upkeep.shared
        self.log.upkeep.shared.close()


@pytest.fixture
def machines(tmp_path: Path, catalog_url: str):
    made = [Machine(tmp_path / name, catalog_url) for name in ("one", "other")]
    yield made
    for machine in made:
        machine.close()


def drawn(url: str) -> int:
    with closing(Access(url)) as access, access.read() as connection:
        return connection.execute(select(tables.budgets.c.drawn)).scalar_one()


def test_two_machines_use_a_whole_budget_and_no_token_more(machines, catalog_url: str) -> None:
    def run(machine: Machine, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            reserved = rng.randint(20, 300)
            machine.spend(reserved, rng.choice([0, reserved // 2, reserved]))

    threads = [threading.Thread(target=run, args=(one, seed)) for seed, one in enumerate(machines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < sum(machine.used for machine in machines) <= BUDGET.tokens
    assert drawn(catalog_url) <= BUDGET.tokens
    # What is held by neither is had by both, down to the last token.
    for machine in machines * 2:
        for other in machines:
            other.log.flush(gives_back=True)
            other.log.upkeep.give_back()
        for size in (64, 8, 1):
            while machine.spend(size, size):
                pass
    assert sum(machine.used for machine in machines) == BUDGET.tokens == drawn(catalog_url)


def test_a_machine_asks_for_a_block_and_then_nobody(machines, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = []
    shared = machines[0].log.upkeep.shared
    draw = shared.draw
    monkeypatch.setattr(shared, "draw", lambda *given: asks.append(given) or draw(*given))
    for _ in range(50):
        assert machines[0].spend(10, 10)
    assert len(asks) == 1


def test_a_request_larger_than_the_rest_is_refused(machines) -> None:
    assert machines[0].spend(15_000, 15_000)
    assert machines[1].admit(5_001) is None
    assert machines[1].admit(5_000) is not None
    with pytest.raises(Shortage) as short:
        machines[0].log.admit(asked(1), [BUDGET])
    assert isinstance(short.value.refusal, LimitReached)
    assert not machines[0].log.upkeep.draw(short.value)
    assert periods(NOON)[0] in str(short.value.refusal)
