"""Compile what constrains an answer in a process of its own, before the engine does.

The process starts with the first such request, and what has passed once is not tried again. A tenant has one
trial at a time, so that the queue holds at most one of each.
"""

import asyncio
import hashlib
import json
import logging
import sys
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

from engine.serving.gateway.asgi import Refused
from engine.serving.gateway.constraints import Constraint
from engine.serving.gateway.grammar_process import CPU_S

# Verdicts that are kept, by the hash of what was tried.
KEPT = 4096
# With its place in the queue and the process's start. A trial itself ends by the CPU seconds that it takes.
WAIT_S = 60.0
BUSY = "The queue of schemas and grammars to compile is long. Try again."
log = logging.getLogger("graftwork.gateway")


class GrammarTrial:
    """Says whether the engine may compile a request's constraints. For one event loop."""

    def __init__(self, base: Path, cpu_s: int = CPU_S, wait_s: float = WAIT_S):
        self._base, self._cpu_s, self.wait_s = base, cpu_s, wait_s
        self._process: asyncio.subprocess.Process | None = None
        # By hash: what is wrong, or None.
        self._verdicts: OrderedDict[str, str | None] = OrderedDict()
        self._turn = asyncio.Lock()
        # A tenant's lock is there as long as somebody waits for it.
        self._tenants: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def check(self, constraints: Sequence[Constraint], tenant: str) -> None:
        """Return once the constraints have been compiled, at once if they were before.

        Raises `Refused`: 400 for what takes too long or too much memory, 429 where the queue is long.
        """
        if not constraints:
            return
        asked = json.dumps(constraints)
        name = hashlib.sha256(asked.encode()).hexdigest()
        if name not in self._verdicts:
            try:
                async with asyncio.timeout(self.wait_s):
                    await self._decide(name, asked, tenant)
            except TimeoutError:
                raise Refused(429, BUSY, "rate_limit_exceeded", headers=[(b"retry-after", b"5")]) from None
        self._verdicts.move_to_end(name)
        if fault := self._verdicts[name]:
            raise Refused(400, f"What constrains the answer {fault}.", "invalid_value", constraints[0].kind)

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _decide(self, name: str, asked: str, tenant: str) -> None:
        async with self._tenants.setdefault(tenant, asyncio.Lock()), self._turn:
            # Whoever was in front may have asked the same.
            if name not in self._verdicts:
                self._verdicts[name] = await self._try(asked)
                if len(self._verdicts) > KEPT:
                    self._verdicts.popitem(last=False)

    async def _try(self, asked: str) -> str | None:
        process = self._process
        if process is None or process.returncode is not None:
            program = ["-m", "engine.serving.gateway.grammar_process", str(self._base), str(self._cpu_s)]
            # It ends when this process does, since its input ends then; an interrupt from the keyboard is not
            # for it.
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable, *program, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        assert process.stdin
        assert process.stdout
        line = b""
        try:
            process.stdin.write(asked.encode() + b"\n")
            with suppress(ConnectionError):
                await process.stdin.drain()
                line = await process.stdout.readline()
        except asyncio.CancelledError:
            # Its next answer would be to this question.
            await self.close()
            raise
        if not line:
            await self.close()
            log.error("The process that compiles grammars ended. The next request starts another.")
            raise Refused(429, BUSY, "rate_limit_exceeded", headers=[(b"retry-after", b"5")])
        fault: str | None = json.loads(line)
        return fault
