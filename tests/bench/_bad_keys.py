"""Calls with bad keys, so many a second, in a process of their own, until its standard input ends.

python tests/bench/_bad_keys.py URL RATE

It prints a line once the first call is refused, and at the end the calls a second that were.
"""

import asyncio
import secrets
import sys
import time

import aiohttp


async def flood(url: str, rate: float) -> None:
    """Send calls at their times, whether or not earlier ones are answered."""
    connector = aiohttp.TCPConnector(limit=0)
    refused, under_way = 0, set[asyncio.Task[None]]()
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    async with aiohttp.ClientSession(url, connector=connector) as session:

        async def bad() -> None:
            nonlocal refused
            headers = {"authorization": f"Bearer gw-{secrets.token_hex(20)}"}
            async with session.post("/v1/completions", data=b"{}", headers=headers) as response:
                await response.read()
                refused += response.status == 401

        await bad()
        print("ready", flush=True)
        refused, sent, began = 0, 0, time.monotonic()
        while not ended.done():
            while sent < (time.monotonic() - began) * rate:
                task = asyncio.create_task(bad())
                under_way.add(task)
                task.add_done_callback(under_way.discard)
                sent += 1
            await asyncio.sleep(0.002)
        print(refused / (time.monotonic() - began), flush=True)
        # The session takes their connections away, which would look as if the server had.
        for task in under_way:
            task.cancel()


if __name__ == "__main__":
    asyncio.run(flood(sys.argv[1], float(sys.argv[2])))
