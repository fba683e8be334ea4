"""What constrains an answer is compiled first in a process that the kernel ends."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from engine.serving.gateway import grammar_trial
from engine.serving.gateway.asgi import Refused
from engine.serving.gateway.constraints import Constraint
from engine.serving.gateway.grammar_trial import GrammarTrial
from tests.helpers.live import eventually
from tests.helpers.slow_schemas import slow_schema

pytestmark = pytest.mark.long
FINE = [Constraint("json", '{"type": "object", "properties": {"a": {"type": "integer"}}}')]
SLOW = [Constraint("json", json.dumps(slow_schema()))]
ALL_KINDS = [
    *FINE,
    Constraint("regex", "[a-z]{1,3}"),
    Constraint("choice", '["yes", "no \\" ü"]'),
    Constraint("grammar", 'root ::= "a" | "b"'),
    Constraint("grammar", 'start: "a" | "b"'),
    Constraint(
        "structural_tag", '{"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}'
    ),
    Constraint(
        "structural_tag",
        '{"structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}], "triggers": ["<a"]}',
    ),
]


@pytest.fixture
async def trial(tiny_base: Path) -> AsyncIterator[GrammarTrial]:
    trial = GrammarTrial(tiny_base, cpu_s=1)
    yield trial
    await trial.close()


def children() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "grammar_process" in " ".join(one.cmdline())]


async def test_what_takes_long_is_refused_and_others_are_compiled(trial: GrammarTrial):
    await trial.check(ALL_KINDS, "acme")
    with pytest.raises(Refused, match="CPU time") as raised:
        await trial.check(SLOW, "acme")
    assert (raised.value.status, raised.value.param) == (400, "json")
    # What cannot be compiled is vLLM's to refuse, and the process goes on.
    await trial.check([Constraint("json", "{"), Constraint("grammar", "root ::=")], "acme")
    (process,) = children()

    # It waits for the next question: until then it may still compute after its answer.
    assert eventually(lambda: process.status() == psutil.STATUS_SLEEPING)
    # Both verdicts are kept: nothing is compiled again.
    before = process.cpu_times()
    await trial.check(ALL_KINDS, "umbrella")
    with pytest.raises(Refused, match="CPU time"):
        await trial.check(SLOW, "umbrella")
    assert process.cpu_times() == before


async def test_a_tenants_queue_is_its_own(trial: GrammarTrial):
    """Of ten slow ones of a tenant, at most one is in front of another tenant's."""
    await trial.check(FINE, "umbrella")
    slow = [Constraint("json", json.dumps(slow_schema(str(number)))) for number in range(10)]
    flood = [asyncio.create_task(trial.check([one], "acme")) for one in slow]
    await asyncio.sleep(0)
    try:
        await trial.check([Constraint("choice", '["a"]')], "umbrella")
        assert sum(task.done() for task in flood) <= 1
    finally:
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)


async def test_a_wait_has_an_end_and_a_killed_process_is_started_again(trial: GrammarTrial):
    await trial.check(FINE, "acme")
    (process,) = children()
    process.suspend()
    trial.wait_s = 0.2
    with pytest.raises(Refused) as raised:
        await trial.check([Constraint("choice", '["b"]')], "acme")
    assert raised.value.status == 429
    assert not process.is_running()
    trial.wait_s = grammar_trial.WAIT_S
    await trial.check([Constraint("choice", '["b"]')], "acme")
    (process,) = children()
    process.kill()
    process.wait()
    with pytest.raises(Refused) as raised:
        await trial.check([Constraint("choice", '["c"]')], "acme")
    assert raised.value.status == 429
    await trial.check([Constraint("choice", '["c"]')], "acme")


def test_the_process_ends_with_its_input(tiny_base: Path):
    program = [sys.executable, "-m", "engine.serving.gateway.grammar_process", str(tiny_base), "1"]
    found = subprocess.run(
        program, input=json.dumps(FINE) + "\n", capture_output=True, text=True, timeout=120
    )
    assert (found.returncode, found.stdout) == (0, "null\n")
