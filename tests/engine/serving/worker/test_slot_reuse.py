"""Slots under traffic: adapters come and go, clients hang up, bytes vanish; nothing leaks, answers stay."""

import asyncio
import os
import random
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

from engine.base.families import BaseShapes
from engine.catalog.revision_rows import location
from tests.helpers.live import CROWDED, RunningEngine, eventually

RANK, SLOTS = CROWDED["max_rank"], CROWDED["slots"]
ADAPTERS = 10
PROMPT = [40, 41, 42, 43, 44, 45]
# Longer than a block of the prefix cache.
LONG_PROMPT = [40 + i % 50 for i in range(200)]


def publish(
    engine: RunningEngine, seed: int, rank: int = RANK, leaves: tuple[str, ...] = (), policy: str = "crowd"
) -> str:
    from transformers import AutoConfig

    generator = torch.Generator().manual_seed(seed)
    shapes = BaseShapes.of(AutoConfig.from_pretrained(engine.base_path).to_dict()).modules()
    tensors = {}
    for name, (inputs, outputs) in shapes.items():
        if not leaves or name.rpartition(".")[2] in leaves:
            tensors[f"{name}.lora_A"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            tensors[f"{name}.lora_B"] = torch.randn(outputs, rank, generator=generator) * 0.3
    return engine.publish(policy, tensors, rank)


def some_adapters(engine: RunningEngine) -> list[str]:
    """Publish adapters of several ranks and targets, so that slots must be cleared in part."""
    kinds = [(RANK, ()), (RANK, ()), (4, ("q_proj", "down_proj")), (RANK, ("gate_proj", "up_proj")), (1, ())]
    return [publish(engine, 100 + i, *kinds[i % len(kinds)]) for i in range(ADAPTERS)]


async def answer(client: httpx.AsyncClient, model: str, prompt: list[int] = PROMPT) -> list[float]:
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 1}
    response = await client.post("/v1/completions", json=body | {"ignore_eos": True})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["logprobs"]["token_logprobs"]


async def hang_up(client: httpx.AsyncClient, model: str) -> None:
    """Ask for many tokens and leave after the first."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for _ in response.aiter_lines():
            return


def connect(engine: RunningEngine) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {engine.key}"}
    return httpx.AsyncClient(base_url=engine.url, headers=headers, timeout=120)


async def one_by_one(
    engine: RunningEngine, names: list[str], prompt: list[int] = PROMPT
) -> list[list[float]]:
    async with connect(engine) as client:
        return [await answer(client, name, prompt) for name in names]


async def traffic(engine: RunningEngine, names: list[str], seconds_: float, activations: int) -> int:
    """Eight clients ask for adapters by chance until so many were activated; every fourth hangs up."""
    chance = random.Random(7)
    deadline = time.monotonic() + seconds_
    done = asyncio.Event()

    async def user(client: httpx.AsyncClient) -> None:
        while not done.is_set() and time.monotonic() < deadline:
            name = chance.choice(names)
            await (hang_up(client, name) if chance.random() < 0.25 else answer(client, name))

    async with connect(engine) as client, asyncio.TaskGroup() as group:
        before = await activated(client)
        for _ in range(8):
            group.create_task(user(client))
        while (count := await activated(client) - before) < activations and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        done.set()
    return count


async def activated(client: httpx.AsyncClient) -> int:
    return (await client.get("/graftwork/loads")).json()[0]["activations"]


def held(engine: RunningEngine) -> tuple[int, int, int]:
    """Return what the engine's processes hold: open files, mappings of the store, anonymous bytes."""
    group = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _group_of(entry) == engine.process.pid
    ]
    files = maps = memory = 0
    for pid in group:
        # One that ends meanwhile holds nothing any more.
        with suppress(FileNotFoundError, ProcessLookupError):
            files += len(os.listdir(f"/proc/{pid}/fd"))
            maps += Path(f"/proc/{pid}/maps").read_text().count(".seg")
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                memory += int(line.split()[1]) * 1024 if line.startswith("RssAnon") else 0
    return files, maps, memory


def _group_of(process: Path) -> int:
    try:
        return os.getpgid(int(process.name))
    except ProcessLookupError:
        return -1


def reuse(engine: RunningEngine, before: int, activations: int, seconds_: float) -> None:
    """Compare what is held after `before` activations with what is held after so many more."""
    names = some_adapters(engine)
    wanted = asyncio.run(one_by_one(engine, names))
    assert len({tuple(each) for each in wanted}) == ADAPTERS
    asyncio.run(traffic(engine, names, seconds_, before))
    asyncio.run(one_by_one(engine, names[:SLOTS]))
    files, _, memory = held(engine)
    count = asyncio.run(traffic(engine, names, seconds_, activations))
    assert count >= activations
    assert asyncio.run(one_by_one(engine, names)) == wanted
    asyncio.run(one_by_one(engine, names[:SLOTS]))
    with engine.client() as client:

        def is_idle() -> bool:
            told = client.get("/graftwork/residency").json()
            return told["loading"] == 0 and not any(one["users"] for one in told["adapters"].values())

        # An answer's end may be sent before its adapter is given back.
        assert eventually(is_idle)
        assert client.get("/graftwork/residency").json()["evictions"] > 0
    # Sockets of clients that hung up close within moments; mappings are those of the host tier.
    assert eventually(lambda: held(engine)[0] <= files + 4)
    _, maps_now, memory_now = held(engine)
    assert maps_now <= ADAPTERS
    assert memory_now - memory < 32 << 20


def test_slots_are_reused_without_a_trace(crowded: RunningEngine):
    reuse(crowded, before=20, activations=100, seconds_=300)


@pytest.mark.slow
def test_slots_are_reused_a_thousand_times(crowded: RunningEngine):
    # Allocators' pools grow by 25 MB in the first thousand, and by 16 MB in the three thousand after it.
    reuse(crowded, before=1000, activations=1000, seconds_=900)


def test_lost_bytes_fail_their_requests_alone(crowded: RunningEngine):
    """A segment cut short between prepare and activate: a 500 for those who are on it, none for the others.

    Whoever comes later has it loaded from where its row says now, and finds no block that the base computed.
    """
    others = some_adapters(crowded)[:2]
    before = asyncio.run(one_by_one(crowded, [*others, crowded.base_name]))
    lost = publish(crowded, 900)
    with crowded.client() as client:
        deadline = time.monotonic() + 30
        while lost not in client.get("/graftwork/residency").json()["adapters"]:
            assert time.monotonic() < deadline
            # Again and again: in a full tier it must be asked for as often as the one that makes room for it.
            client.post("/v1/prewarm", json={"model": lost}).raise_for_status()
            time.sleep(0.02)
    row = crowded.catalog.revisions.get("crowd", lost.partition("@")[2])
    payload = crowded.store.read(location(row))
    os.truncate(crowded.store.path(row.segment), row.offset + 4096)

    async def mixed() -> list[httpx.Response]:
        names = [crowded.base_name, lost, others[0], lost, others[1]]
        body = {"prompt": LONG_PROMPT, "max_tokens": 1, "temperature": 0, "logprobs": 1}
        async with connect(crowded) as client:
            asked = [client.post("/v1/completions", json=body | {"model": name}) for name in names]
            return await asyncio.gather(*asked)

    base, one, other, two, last = (response.status_code for response in asyncio.run(mixed()))
    assert (base, other, last) == (200, 200, 200)
    # Whoever comes once the loss is known is told so, by a 503; whoever was on it fails.
    assert 500 in (one, two)
    assert {one, two} <= {500, 503}
    assert asyncio.run(one_by_one(crowded, [*others, crowded.base_name])) == before
    deadline = time.monotonic() + 30
    while "are not in" not in (said := asyncio.run(mixed())[1]).text:
        assert said.status_code in (500, 503)
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert said.status_code == 503
    at = crowded.store.append(payload)
    crowded.catalog.places.replace(replace(row, segment=at.segment, offset=at.offset))
    twin = publish(crowded, 900, policy="twin")
    found, wanted = asyncio.run(one_by_one(crowded, [lost, twin], LONG_PROMPT))
    assert found == wanted
    crowded.store.close()
