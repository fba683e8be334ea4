"""Two gateways on machines of their own behind HAProxy, which are killed: each request is billed once."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from engine.catalog.access import Access
from engine.metering.dead_gateways import close_dead
from engine.metering.shared_usage import SharedUsage, sums_by
from engine.metering.usage_rows import connect
from engine.settings.params import Params
from tests.helpers.gateways import open_world
from tests.helpers.haproxy import balanced
from tests.helpers.live import eventually, free_port
from tests.helpers.postgres import fresh_database
from tests.helpers.usage_rows import usage_rows

from .test_gateway_process import TURN, engines_count, started

pytestmark = pytest.mark.services
CLIENTS = 12
COLUMNS = "id, status IS NOT NULL, coalesce(prompt + completion, 0), reserved, repeated"


class Row(NamedTuple):
    """A request in a usage log; one that has no end was under way in a gateway that was killed."""

    id: str
    has_ended: bool
    tokens: int
    reserved: int
    is_repeated: bool


class Machine:
    """One machine: its state directory, and a gateway that is killed and started again."""

    def __init__(self, root: Path, catalog_url: str):
        self.root, self.catalog_url = root, catalog_url
        self.port = free_port()
        self.process: Any = None
        root.mkdir()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log_bytes(self) -> int:
        """Return how much its engine has noted: the busier one has more."""
        log = self.root / "engine.log"
        return log.stat().st_size if log.exists() else 0

    def start(self) -> None:
        self.process = started(self.root, self.port, 0.002, self.catalog_url)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def rows(self) -> list["Row"]:
        """Return the requests that were admitted here."""
        return [Row(*row) for row in usage_rows(self.root / "usage", COLUMNS)]

    def hand_over(self, access: Access) -> None:
        """Close what the dead left, and copy the log, as the next gateway of this machine does."""
        with closing(connect(self.root / "usage" / "usage.db")) as connection:
            close_dead(self.root / "usage", connection)
        assert SharedUsage(self.root / "usage", access).copy()


@pytest.fixture
def machines(tmp_path: Path, postgres_server: str) -> Iterator[tuple[Machine, Machine]]:
    url = fresh_database(postgres_server)
    pair = Machine(tmp_path / "one", url), Machine(tmp_path / "two", url)
    yield pair
    for machine in pair:
        if machine.process is not None:
            machine.kill()


async def ask_for_ever(url: str, key: str, answered: dict[str, int], is_over: asyncio.Event) -> Counter[str]:
    """Have clients ask, a third of them for streams; note each whole answer's tokens by its id."""
    seen: Counter[str] = Counter()

    async def client(number: int) -> None:
        is_stream = number % 3 == 0
        headers = {"authorization": f"Bearer {key}"}
        while not is_over.is_set():
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as asking:
                try:
                    response = await asking.post("/v1/completions", json=TURN | {"stream": is_stream})
                except httpx.TransportError as error:
                    # A stream that began breaks with its gateway.
                    seen["streams broken" if is_stream else f"failed: {error!r}"] += 1
                    continue
            if response.status_code == 503:
                # HAProxy has not seen yet that the other one is back.
                seen["refused"] += 1
                await asyncio.sleep(0.05)
                continue
            assert response.status_code == 200, response.text
            seen["whole"] += 1
            if not is_stream:
                found = response.json()
                assert found["id"] not in answered
                answered[found["id"]] = found["usage"]["prompt_tokens"] + found["usage"]["completion_tokens"]

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return seen


async def kill_in_turns(machines: tuple[Machine, Machine], times: int, answered: dict[str, int]) -> None:
    draw, victim = random.Random(0), machines[0]
    for number in range(times):
        wanted = len(answered) + draw.randint(20, 80)
        deadline = time.monotonic() + 60
        while len(answered) < wanted:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.002)
        # First the one that HAProxy sends the policy's requests to.
        victim = machines[machines[0] is victim] if number else max(machines, key=Machine.log_bytes)
        await asyncio.to_thread(victim.kill)
        if number + 1 < times:
            await asyncio.to_thread(victim.start)
    # The other one goes on alone for a while.
    most = len(answered) + 20
    while len(answered) < most:
        assert time.monotonic() < deadline + 60
        await asyncio.sleep(0.002)


def kills(machines: tuple[Machine, Machine], root: Path, times: int) -> None:
    url = machines[0].catalog_url
    with closing(open_world(root / "world", url=url)) as world:
        key = world.key()
    params = Params.model_validate({"state_dir": str(root), "catalog": {"url": url}})
    answered: dict[str, int] = {}
    with ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Machine.start, machines))
        front = stack.enter_context(balanced(params, [machine.url for machine in machines], root))

        async def run() -> Counter[str]:
            is_over = asyncio.Event()
            asking = asyncio.create_task(ask_for_ever(front, key, answered, is_over))
            killing = asyncio.create_task(kill_in_turns(machines, times, answered))
            await asyncio.wait({asking, killing}, return_when=asyncio.FIRST_COMPLETED)
            is_over.set()
            # Clients end by themselves only when one of them met what it must not.
            killing.cancel() if not killing.done() else killing.result()
            return await asking

        seen = asyncio.run(run())
        assert not [what for what in seen if what.startswith("failed")]
        living = [machine for machine in machines if machine.process.poll() is None]
        assert eventually(lambda: all(row.has_ended for one in living for row in one.rows()[-CLIENTS:]))
        for machine in living:
            machine.kill()
    with closing(Access(url)) as access:
        for machine in machines:
            machine.hand_over(access)
        billed = sums_by(access, "tenant", 0, 1 << 30)
    rows = [row for machine in machines for row in machine.rows()]
    ended = {row.id: row.tokens for row in rows if row.has_ended}
    asked_again = [row for row in rows if not row.has_ended and row.is_repeated]
    lost = [row for row in rows if not row.has_ended and not row.is_repeated]
    # No request without a row, and none with two that count.
    for machine in machines:
        began, _ = engines_count(machine.root)
        assert began <= {row.id.removeprefix("cmpl-") for row in machine.rows()}
    assert len(ended) == sum(row.has_ended for row in rows)
    assert not ended.keys() & {row.id for row in lost}
    # A kill meets of each client at most what was under way and what had just ended; one may meet nothing.
    assert times // 50 <= len(asked_again) + len(lost) <= 2 * CLIENTS * times
    # Every answer is billed as its client was told, but for one that was sent right before a kill.
    unbilled = answered.keys() - ended.keys()
    assert unbilled <= {row.id for row in asked_again}
    assert all(ended[id] == answered[id] for id in answered.keys() - unbilled)
    ((tenant, purpose, requests, prompt, completion, unknown),) = billed
    assert (tenant, purpose) == ("acme", "user")
    assert (requests, prompt + completion) == (len(ended) + len(lost), sum(ended.values()))
    assert unknown == sum(row.reserved for row in lost)
    print(
        f"{times} kills, {dict(seen)}: {len(asked_again)} asked again, {len(lost)} streams as reserved, "
        f"{len(unbilled)} of {len(answered)} answers not billed"
    )


def test_requests_of_a_gateway_that_is_killed_beside_another_are_billed_once(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    kills(machines, tmp_path, 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_requests_of_two_gateways_in_a_hundred_kills(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    kills(machines, tmp_path, 100)
