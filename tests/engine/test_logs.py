"""Logs for a collector: a JSON object a line, with the id of the request it belongs to."""

import asyncio
import json
import logging
import subprocess
import sys
from contextvars import copy_context

import pytest

from engine.logs import REQUEST, JsonLines, configuration

PROGRAM = """
import logging, uvicorn
from engine.logs import set_up
set_up({form!r})
uvicorn.Config("none:none", log_config=None)
logging.getLogger("graftwork.some").warning("Said %s.", "once")
logging.getLogger("uvicorn.error").info("Started.")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("graftwork.some").exception("It failed.")
"""


def said(form: str) -> list[str]:
    command = [sys.executable, "-c", PROGRAM.format(form=form)]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert run.stdout == ""
    return run.stderr.splitlines()


@pytest.mark.services
def test_each_line_is_an_object_and_none_comes_twice() -> None:
    lines = [json.loads(line) for line in said("json")]
    assert [line["message"] for line in lines] == ["Said once.", "Started.", "It failed."]
    assert {line["logger"] for line in lines} == {"graftwork.some", "uvicorn.error"}
    assert lines[0].keys() == {"at", "level", "logger", "message"}
    assert lines[2]["error"].endswith("ZeroDivisionError: division by zero")


@pytest.mark.services
def test_lines_for_people_stay() -> None:
    assert said("text")[0].endswith("WARNING graftwork.some: Said once.")


def test_a_line_has_the_id_of_its_request() -> None:
    record = logging.LogRecord("graftwork", logging.WARNING, "", 0, "Line\nbreak", (), None)

    async def requests() -> list[str]:
        async def one(name: str) -> str:
            REQUEST.set(name)
            await asyncio.sleep(0)
            return JsonLines().format(record)

        tasks = [asyncio.create_task(one(name), context=copy_context()) for name in "ab"]
        return await asyncio.gather(*tasks)

    lines = asyncio.run(requests())
    assert [json.loads(line)["request"] for line in lines] == ["a", "b"]
    assert all("\n" not in line for line in lines)
    assert "request" not in json.loads(JsonLines().format(record))


def test_vllm_takes_the_configuration() -> None:
    """It wants one that `logging.config` takes, as JSON."""
    assert json.loads(json.dumps(configuration())) == configuration()
