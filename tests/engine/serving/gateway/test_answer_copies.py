"""Copies of users' answers: which are taken, what a copy says, how long and how many are kept."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.catalog.catalog import Policy
from engine.serving.gateway import answer_copies
from engine.serving.gateway.answer_copies import COPIED, AnswerCopies
from tests.helpers import gateway_world
from tests.helpers.api_answers import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Said, body_of, pieces, whole
from tests.helpers.gateway_world import CANARY, unit_of, warm
from tests.helpers.gateways import World, open_world

POLICY = "acme-sums"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = open_world(tmp_path)
    yield world
    world.close()


class Asker:
    """A gateway's client with the installation's key, and a user of `POLICY`."""

    def __init__(self, world: World):
        self.admin, self.user = world.client(world.key("me", ["admin"], ())), world.client(world.key())

    async def copies(self, share: float = 1.0, most: int = 100, **policies: float) -> dict[str, Any]:
        body = {"policies": policies or {POLICY: share}, "most": most}
        answer = await self.admin.post("/graftwork/copies", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def ask(self, path: str = COMPLETIONS, headers: Any = None, **fields: Any) -> httpx.Response:
        body = body_of(path, POLICY, **fields)
        answer = await self.user.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer


@pytest.fixture
def asker(world: World) -> Asker:
    return Asker(world)


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_answers_of_other_apis_are_timed_alone(asker: Asker, path: str) -> None:
    await asker.copies()
    await asker.ask(path)
    told = await asker.copies()
    assert (told["copies"], told["dropped"], len(told["users"]["whole"])) == ([], 0, 1)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_copy_is_what_the_client_sent_and_got(world: World, asker: Asker, path: str) -> None:
    assert await asker.copies() == {
        "copies": [], "dropped": 0, "users": {"streamed": [], "whole": []}
    }  # fmt: skip
    more = {"safety_identifier": "ann", "metadata": {"more": "\u2028"}}
    said = {is_stream: await asker.ask(path, stream=is_stream, **more) for is_stream in (False, True)}
    told = await asker.copies()
    for is_stream, copy, (_, row) in zip(said, told["copies"], world.events.rows, strict=True):
        assert copy["request"] == body_of(path, POLICY, stream=is_stream, **more)
        assert (copy["answer"], copy["path"], copy["is_stream"]) == (said[is_stream].text, path, is_stream)
        timed = {"latency_s": copy["latency_s"]}
        assert {name: copy[name] for name in COPIED} == {name: row[name] for name in COPIED} | timed
        assert (copy["arm"], copy["outcome"], copy["status"]) == ("champion", "ok", 200)
        assert copy["unit"] not in (None, "ann")
    # The time of the stream.
    for kind, copy in zip(("whole", "streamed"), told["copies"], strict=True):
        (seconds,) = told["users"][kind]
        assert 0 < seconds <= copy["latency_s"]
    assert (await asker.copies())["copies"] == []


async def test_only_what_users_got_whole_of_these_policies_is_copied(world: World, asker: Asker) -> None:
    other = world.client(world.key("umbrella"))
    await asker.ask()
    assert world.state.copied is None
    await asker.copies()
    for fields in ({"n": 2}, {"prompt": ["a", "b"]}):
        await asker.ask(**fields)
    await other.post(COMPLETIONS, json=body_of(COMPLETIONS, "umbrella-sums"))
    scorer = world.client(world.key(roles=["score"]))
    headers = {"x-graftwork-purpose": "score"}
    assert (
        await scorer.post(COMPLETIONS, json=body_of(COMPLETIONS, POLICY), headers=headers)
    ).status_code == 200
    world.server.fault = (500, {"error": {"message": "It broke."}})
    await asker.user.post(COMPLETIONS, json=body_of(COMPLETIONS, POLICY))
    world.server.fault = None
    wanted = await asker.ask()
    assert [copy["id"] for copy in (await asker.copies())["copies"]] == [wanted.json()["id"]]
    # What was copied for a subscription is not told to another one.
    await asker.ask()
    assert (await asker.copies(**{"umbrella-sums": 1.0}))["copies"] == []


async def test_a_policy_without_a_champion_is_copied_as_the_base(world: World, asker: Asker) -> None:
    world.catalog.policies.add(Policy("acme-new", "base", {}, "acme", 0.0))
    await asker.copies(**{"acme-new": 1.0})
    await asker.user.post(COMPLETIONS, json=body_of(COMPLETIONS, "acme-new"))
    (copy,) = (await asker.copies(**{"acme-new": 1.0}))["copies"]
    assert (copy["arm"], copy["digest"], copy["policy"]) == ("base", None, "acme-new")


async def test_the_share_is_drawn_by_the_ids(asker: Asker) -> None:
    await asker.copies(0.0)
    for _ in range(5):
        await asker.ask()
    assert (await asker.copies(0.25))["copies"] == []
    ids = [(await asker.ask()).headers["x-request-id"] for _ in range(200)]
    copied = [copy["id"].removeprefix("cmpl-") for copy in (await asker.copies(0.25, 200))["copies"]]
    assert copied == [id for id in ids if int(id[20:], 16) < 0.25 * 16**12]
    assert 20 <= len(copied) <= 80


async def test_what_is_too_large_or_too_much_or_too_old_is_dropped(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asker.copies()
    monkeypatch.setattr(answer_copies, "MOST_BYTES", 2000)
    await asker.ask(prompt="x" * 2000)
    await asker.ask(CHAT, stream=True, max_tokens=60)
    small = await asker.ask()
    told = await asker.copies()
    assert ([copy["id"] for copy in told["copies"]], told["dropped"]) == ([small.json()["id"]], 2)
    monkeypatch.setattr(answer_copies, "WAITING_BYTES", 3 * 2500)
    ids = [(await asker.ask()).json()["id"] for _ in range(5)]
    told = await asker.copies(most=2)
    assert ([copy["id"] for copy in told["copies"]], told["dropped"]) == (ids[2:4], 2)
    monkeypatch.setattr(answer_copies, "TAKEN_BYTES", 1)
    await asker.ask()
    told = await asker.copies()
    assert ([copy["id"] for copy in told["copies"]], told["dropped"]) == ([ids[4]], 0)
    monkeypatch.setattr(answer_copies, "WAITING_S", 0.0)
    told = await asker.copies()
    assert (told["copies"], told["dropped"]) == ([], 1)


async def test_who_stops_asking_leaves_nothing_behind(
    world: World, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds in (0.2, 60.0):
        monkeypatch.setattr(answer_copies, "SUBSCRIBED_S", seconds)
        await asker.copies()
    await asyncio.sleep(0.3)
    # The second call renewed it.
    assert world.state.copied is not None
    await asker.ask()
    monkeypatch.setattr(answer_copies, "SUBSCRIBED_S", 0.05)
    await asker.copies(most=0)
    await asyncio.sleep(0.2)
    assert world.state.copied is None
    await asker.ask()
    assert await asker.copies() == {
        "copies": [], "dropped": 0, "users": {"streamed": [], "whole": []}
    }  # fmt: skip
    await asker.ask()
    assert (await asker.admin.post("/graftwork/copies", json={"policies": {}, "most": 9})).json()[
        "copies"
    ] == []
    assert world.state.copied is None


async def test_a_share_is_a_number_of_a_policy(asker: Asker) -> None:
    for policies in ({POLICY: 1.5}, {POLICY: "much"}, [POLICY]):
        answer = await asker.admin.post("/graftwork/copies", json={"policies": policies, "most": 1})
        assert answer.status_code == 400


async def test_only_an_admins_key_reads_users_text(world: World, asker: Asker) -> None:
    await asker.copies()
    await asker.ask()
    every = world.client(world.key(roles=["infer", "score", "train", "metrics", "release", "pin"]))
    for client, status in ((every, 403), (asker.user, 403), (world.client(None), 401)):
        answer = await client.post("/graftwork/copies", json={"policies": {POLICY: 1}, "most": 9})
        assert answer.status_code == status
    assert len((await asker.copies())["copies"]) == 1


async def test_times_of_streams_are_those_of_users(world: World, asker: Asker) -> None:
    """A whole answer's first byte comes with its last, so that streams say more."""
    world.server.step_s = 0.01
    await asker.copies()
    await asker.ask(max_tokens=20)
    assert (await asker.copies())["users"]["whole"][0] > 0.2
    waits = [(await asker.ask(CHAT, stream=True, max_tokens=20)).elapsed.total_seconds() for _ in range(4)]
    users = (await asker.copies())["users"]
    assert (len(users["streamed"]), users["whole"]) == (4, [])
    # After its first byte each has 19 steps, however long a busy machine takes before it.
    spared = [whole - first for whole, first in zip(waits, users["streamed"], strict=True)]
    assert min(spared) >= 19 * world.server.step_s


@pytest.fixture
def fallible(tmp_path: Path) -> Iterator[Any]:
    world = gateway_world.make_world(tmp_path)
    yield world
    world.usage.close()


async def test_the_answer_in_a_failed_canarys_place_is_not_copied_as_its_own(fallible: Any) -> None:
    copies = AnswerCopies()
    copies.subscribe(fallible.state, {"sums": 1.0})
    await warm(fallible, CANARY)
    served, first = f"sums@{CANARY[:12]}", pieces(COMPLETIONS, [Said()])[0]
    user = unit_of(fallible, "canary")

    async def breaks(receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def ends_early(receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def answers_whole(receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": whole(COMPLETIONS, [Said()])})

    async with fallible.client() as client:
        body = body_of(COMPLETIONS, "sums", user=user)
        for answering, is_stream in ((breaks, False), (ends_early, True)):
            fallible.server.instead[served] = answering
            await client.post(COMPLETIONS, json=body | {"stream": is_stream})
        assert json.loads(copies.take(9))["copies"] == []
        fallible.server.instead[served] = answers_whole
        said = await client.post(COMPLETIONS, json=body)
    (copy,) = json.loads(copies.take(9))["copies"]
    assert (copy["arm"], copy["digest"], copy["answer"]) == ("canary", CANARY, said.text)
    copies.subscribe(fallible.state, {})
