"""A canary never makes a user's request fail: the champion answers in its place, for neither arm."""

import asyncio
import json
from dataclasses import replace
from unittest.mock import Mock

import pytest

from engine.errors import DamagedBytes, ServiceError
from tests.helpers.adapters_cold import settle
from tests.helpers.gateway_world import CANARY, CHAMPION, make_world, unit_of, warm

SERVED = {CHAMPION: f"sums@{CHAMPION[:12]}", CANARY: f"sums@{CANARY[:12]}"}


@pytest.fixture
def world(tmp_path):
    world = make_world(tmp_path)
    yield world
    world.usage.close()


async def ask(world, arm: str = "canary", **more):
    async with world.client() as client:
        return await client.post(
            "/v1/completions", json={"model": "sums", "user": unit_of(world, arm)} | more
        )


def observed(world) -> list[tuple[str, str | None, int]]:
    return [(row["arm"], row["digest"], row["status"]) for _, row in world.events.rows]


def answering(status: int):
    async def answer(receive, send):
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b'{"error": {"message": "It broke."}}'})

    return answer


def streaming(*pieces: bytes):
    async def answer(receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return answer


async def raising(receive, send):
    raise RuntimeError("The engine died.")


async def raising_in_its_stream(receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise RuntimeError("The engine died.")


TOLD = b'data: {"error": {"message": "It broke.", "code": 500}}\n\n'
FAULTS = {
    "an error": (answering(500), 500),
    "overload": (answering(503), 503),
    "an exception": (raising, 500),
    "an exception in its stream": (raising_in_its_stream, 500),
    "an error in its stream": (streaming(TOLD), 500),
    "a name that vLLM cannot find": (answering(404), 404),
}


@pytest.mark.parametrize("fault", list(FAULTS))
async def test_the_champion_answers_when_a_canary_fails_before_its_first_byte(world, fault):
    await warm(world, CANARY)
    world.server.instead[SERVED[CANARY]], status = FAULTS[fault]
    response = await ask(world, stream="stream" in fault)
    assert (response.status_code, response.headers["x-graftwork-revision"]) == (200, SERVED[CHAMPION])
    assert response.json()["id"].startswith("cmpl-")
    assert observed(world) == [("canary", CANARY, status), ("fallback", CHAMPION, 200)]
    attempt, answer = (row for _, row in world.events.rows)
    assert attempt["unit"] == answer["unit"]
    # A rating of the answer names its id.
    assert (answer["id"], attempt["id"]) == (response.json()["id"], f"{answer['id']}-canary")
    assert all(resident.users == 0 for resident in world.state.residency.residents.values())


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_users_own_fault_is_answered_by_the_canary(world, status):
    await warm(world, CANARY)
    world.server.instead[SERVED[CANARY]] = answering(status)
    response = await ask(world)
    assert (response.status_code, response.headers["x-graftwork-revision"]) == (status, SERVED[CANARY])
    assert observed(world) == [("canary", CANARY, status)]


async def test_an_error_after_the_first_byte_counts_and_stays(world):
    """What was sent cannot be taken back."""
    await warm(world, CANARY)
    world.server.instead[SERVED[CANARY]] = streaming(b'data: {"choices":[]}\n\n', TOLD)
    response = await ask(world, stream=True)
    assert (response.status_code, response.headers["x-graftwork-revision"]) == (200, SERVED[CANARY])
    assert observed(world) == [("canary", CANARY, 500)]


async def test_a_champion_that_fails_too_is_the_users_error(world):
    await warm(world, CANARY)
    world.server.instead = {SERVED[CANARY]: answering(500), SERVED[CHAMPION]: answering(500)}
    assert (await ask(world)).status_code == 500
    assert observed(world) == [("canary", CANARY, 500), ("fallback", CHAMPION, 500)]


@pytest.mark.parametrize("arm", ["champion", "pinned"])
async def test_nobody_answers_in_the_place_of_another_arm(world, arm):
    served = SERVED[CHAMPION] if arm == "champion" else SERVED[CANARY]
    world.server.instead[served] = answering(500)
    response = await ask(world, "champion", **({} if arm == "champion" else {"model": served}))
    assert (response.status_code, response.headers["x-graftwork-revision"]) == (500, served)
    assert [status for _, _, status in observed(world)] == [500]


async def test_nobody_waits_for_a_canary_that_is_not_resident(world):
    await warm(world, CHAMPION)
    world.engine.may_end.clear()
    # Whoever waited for the canary would wait for ever.
    async with asyncio.timeout(30):
        response = await ask(world)
    assert SERVED[CANARY] not in world.state.residency.residents
    assert response.headers["x-graftwork-revision"] == SERVED[CHAMPION]
    world.engine.may_end.set()
    await settle(lambda: SERVED[CANARY] in world.state.residency.residents)
    assert (await ask(world)).headers["x-graftwork-revision"] == SERVED[CANARY]
    assert observed(world) == [("fallback", CHAMPION, 200), ("canary", CANARY, 200)]


async def test_a_canary_that_becomes_resident_meanwhile_may_answer(world):
    """Both are cold, and the canary is there before the champion is."""
    world.engine.seconds = 0.02
    asked = asyncio.create_task(ask(world))
    await asked
    assert observed(world)[0][0] in ("canary", "fallback")
    assert asked.result().status_code == 200


@pytest.mark.parametrize(
    "fault",
    [DamagedBytes("its bytes are damaged."), ServiceError("The store is down.")],
    ids=["damaged", "store"],
)
async def test_a_canary_that_cannot_be_loaded_is_answered_for(world, fault):
    await warm(world, CHAMPION)
    for _ in range(3):
        world.engine.faults = [fault]
        response = await ask(world)
        assert (response.status_code, response.headers["x-graftwork-revision"]) == (200, SERVED[CHAMPION])
        await asyncio.sleep(0.02)
    assert observed(world) == [("fallback", CHAMPION, 200)] * 3


async def test_a_canary_of_another_base_is_answered_for(world):
    row = world.catalog.revisions.get("sums", CANARY)
    foreign = "f" * 64
    world.catalog.revisions.add_many([replace(row, digest=foreign, base="another")])
    route = world.catalog.routes.get("sums")
    world.catalog.routes.update(replace(route, canary=foreign), route.version)
    response = await ask(world)
    assert (response.status_code, response.headers["x-graftwork-revision"]) == (200, SERVED[CHAMPION])


async def test_the_base_answers_for_a_first_canary(world):
    route = world.catalog.routes.get("sums")
    world.catalog.routes.update(replace(route, champion=None), route.version)
    response = await ask(world)
    assert (response.status_code, response.headers["x-graftwork-revision"]) == (200, "base")
    assert observed(world) == [("fallback", None, 200)]


async def leave(world, answer, **more) -> None:
    """Ask, and leave before the first byte."""
    body = {"model": "sums", "user": unit_of(world, "canary")} | more
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    headers = [(b"authorization", f"Bearer {world.keys['user']}".encode())]
    scope = {"type": "http", "path": "/v1/completions", "headers": headers, "method": "POST"}
    world.server.instead[SERVED[CANARY]] = answer

    async def receive():
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message): ...

    await asyncio.wait_for(world.call(scope, receive, send), 60)


async def ended_with_nothing(receive, send):
    """As vLLM does once it has seen that the client left."""
    assert (await receive())["type"] == "http.disconnect"
    await answering(200)(receive, send)


async def failed_for_nobody(receive, send):
    assert (await receive())["type"] == "http.disconnect"
    await answering(500)(receive, send)


async def cut_off(receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    assert (await receive())["type"] == "http.disconnect"


async def test_a_canary_whose_place_nobody_can_take_is_an_error_of_both(world, monkeypatch):
    """Its own attempt is observed, and what its client got in the end."""
    await warm(world, CANARY)
    world.server.instead[f"sums@{CANARY[:12]}"] = answering(500)
    silent = ServiceError("The catalog cannot be read. Try again.")
    monkeypatch.setattr(world.state.router, "instead_of", Mock(side_effect=silent))
    async with world.client() as client:
        body = {"model": "sums", "prompt": "1", "user": unit_of(world, "canary")}
        assert (await client.post("/v1/completions", json=body)).status_code == 503
    rows = [row for table, row in world.events.rows if table == "observations"]
    assert [(row["status"], row["id"].endswith("-canary")) for row in rows] == [(500, True), (503, False)]


@pytest.mark.parametrize("answer", [ended_with_nothing, failed_for_nobody, cut_off])
async def test_a_client_that_leaves_before_the_first_byte_is_nobodys_error(world, answer):
    await warm(world, CANARY)
    await leave(world, answer)
    assert observed(world) == [("canary", CANARY, 499)]


async def test_a_client_whose_request_ends_by_an_exception_after_it_left_is_nobodys_error(world):
    async def cancelled(receive, send):
        await receive()
        raise RuntimeError("The client left.")

    await warm(world, CANARY)
    with pytest.raises(RuntimeError):
        await leave(world, cancelled)
    assert observed(world) == [("canary", CANARY, 499)]
