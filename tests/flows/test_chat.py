"""`graftwork chat` before a fake gateway: what is asked, what is shown, and how it ends."""

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from engine.clients import http_client as http
from engine.settings.params import Params
from engine.settings.policies import FewShotExample, PolicyConfig
from flows import display
from tests.helpers.command_line import graftwork
from tests.helpers.live import free_port

PINNED = "sums@aaaaaaaaaaaa"
BAD = "sums@bbbbbbbbbbbb"
REASON = f"{BAD} was rolled back: it was bad. `graftwork rollback --lift` makes it available again."


class Gateway:
    """Answers a chat with its model's name and the number of its turns, in three pieces.

    `during` is called before the last piece; `fault` ends the answers instead of it.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.during: Callable[[], object] = lambda: None
        self.fault: str | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/graftwork/marker":
            return httpx.Response(200, json={"base_name": "tiny"})
        if request.url.path.startswith("/v1/models/"):
            return self.model(request.url.path.removeprefix("/v1/models/"))
        assert request.headers["authorization"] == "Bearer gw-local"
        body = json.loads(request.content)
        self.bodies.append(body)
        revision = {"sums": PINNED, "tiny": "base"}.get(body["model"], body["model"])
        headers = {"content-type": "text/event-stream", "x-graftwork-revision": revision}
        return httpx.Response(200, headers=headers, content=self.events(body))

    def model(self, name: str) -> httpx.Response:
        if name == BAD:
            return httpx.Response(410, json={"error": {"message": REASON}})
        if name in ("sums", PINNED, "tiny"):
            return httpx.Response(200, json={"id": name})
        said = f"Unknown model {name!r}. Known models: tiny, sums."
        return httpx.Response(404, json={"error": {"message": said, "nearest": ["tiny", "sums"]}})

    def events(self, body: dict[str, Any]) -> Iterator[bytes]:
        yield event({"role": "assistant"})
        yield event({"content": f"{body['model']} after "})
        self.during()
        if self.fault:
            yield b'data: {"error": {"message": "The worker died."}}\n\n'
        yield event({"content": f"{len(body['messages'])} turns [b]"})
        yield b"data: [DONE]\n\n"


def event(delta: dict[str, str]) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Gateway:
    made = Gateway()

    def connect(url: str, timeout_s: float) -> httpx.Client:
        return httpx.Client(base_url=url, transport=httpx.MockTransport(made))

    monkeypatch.setattr(http, "connect", connect)
    return made


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Settings with one policy, which has a system prompt and an example."""
    example = FewShotExample(question="1 + 1?", answer="2")
    config = PolicyConfig(task="addition", suite="s", system="Be terse.", few_shot=(example,))
    params = Params(state_dir=tmp_path / "state", policies={"sums": config}, engine={"port": free_port()})
    params.paths.local_key.parent.mkdir()
    params.paths.local_key.write_text("gw-local\n")
    path = tmp_path / "params.json"
    path.write_text(params.model_dump_json())
    return str(path)


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """Let a person at a terminal type these lines; an exception is a key such as Ctrl-D."""
    left = iter([*lines, EOFError])

    def read(prompt: str) -> str:
        assert prompt == "> "
        line = next(left)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", read)


def test_a_pipe_is_a_conversation_with_the_policys_own_opening(
    gateway: Gateway, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 3 + 4?\n\nAnd 5 + 6?\n"))
    said = graftwork("chat", "sums", "--params", file)
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout == f"{PINNED}: sums after 4 turns [b]\n{PINNED}: sums after 6 turns [b]\n"
    first, second = gateway.bodies
    opening = [("system", "Be terse."), ("user", "1 + 1?"), ("assistant", "2"), ("user", "What is 3 + 4?")]
    assert [(turn["role"], turn["content"]) for turn in first["messages"]] == opening
    assert second["messages"][:4] == first["messages"]
    assert second["messages"][4] == {"role": "assistant", "content": "sums after 4 turns [b]"}
    # One side of a canary answers the whole conversation, greedily.
    assert first["user"] == second["user"]
    assert (first["temperature"], first["stream"]) == (0.0, True)


@pytest.mark.parametrize("asked", [["--compare"], ["--against", "tiny"]])
def test_a_comparison_asks_both_and_each_keeps_its_own_answers(
    gateway: Gateway, file: str, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    said = graftwork("chat", PINNED, *asked, "--params", file)
    assert said.returncode == 0
    assert [body["model"] for body in gateway.bodies] == [PINNED, "tiny"] * 2
    assert said.stdout.splitlines()[:2] == [
        f"{PINNED}: {PINNED} after 4 turns [b]",
        "base: tiny after 4 turns [b]",
    ]
    assert [body["messages"][4]["content"] for body in gateway.bodies[2:]] == [
        f"{PINNED} after 4 turns [b]",
        "tiny after 4 turns [b]",
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["sume"], 5, "Unknown model 'sume'. Known models: tiny, sums."),
        ([BAD], 1, REASON),
        (["sums", "--against", BAD], 1, REASON),
    ],
)
def test_a_name_that_is_not_served_is_told_before_anything_is_typed(
    gateway: Gateway, file: str, arguments: list[str], code: int, sentence: str
) -> None:
    said = graftwork("chat", *arguments, "--params", file)
    assert (said.returncode, said.stdout, said.stderr.strip()) == (code, "", sentence)
    assert gateway.bodies == []


def test_without_a_gateway_one_is_told_how_to_start_it(file: str) -> None:
    said = graftwork("chat", "sums", "--params", file)
    assert said.returncode == 7
    assert re.search(r"The engine at .* does not answer .*`graftwork up`", said.stderr)


def test_an_answer_that_breaks_off_ends_a_pipe_and_not_a_person(
    gateway: Gateway, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.fault = "died"
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    said = graftwork("chat", "sums", "--params", file)
    assert (said.returncode, len(gateway.bodies)) == (7, 1)
    assert "The worker died." in said.stderr
    typed(monkeypatch, "one", "two")
    said = graftwork("chat", "sums", "--params", file)
    assert (said.returncode, len(gateway.bodies)) == (0, 3)
    assert said.stderr.count("The worker died.") == 2


def test_ctrl_c_stops_an_answer_and_leaves_at_the_prompt(
    gateway: Gateway, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        if len(gateway.bodies) == 1:
            raise KeyboardInterrupt

    gateway.during = interrupt
    typed(monkeypatch, "one", "two", KeyboardInterrupt, "never")
    said = graftwork("chat", "sums", "--params", file)
    assert said.returncode == 0
    assert "Stopped." in said.stdout
    assert [body["messages"][-1]["content"] for body in gateway.bodies] == ["one", "two"]
    # What was stopped is no turn of the conversation.
    assert len(gateway.bodies[1]["messages"]) == 4


@pytest.mark.parametrize("compare", [False, True])
def test_in_a_terminal_answers_grow_as_they_come(
    gateway: Gateway, file: str, monkeypatch: pytest.MonkeyPatch, compare: bool
) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100, color_system=None, highlight=False)
    monkeypatch.setattr(display, "console", console)
    shown: list[str] = []
    gateway.during = lambda: shown.append(written.getvalue())
    typed(monkeypatch, "one")
    said = graftwork("chat", "sums", *(["--compare"] if compare else []), "--params", file)
    assert said.returncode == 0
    # Before the last piece has come, the one before it is on the screen.
    assert "sums after" in shown[0]
    assert "turns" not in shown[0]
    plain = re.sub(r"\x1b\[[\d?;]*[A-Za-z]", "", written.getvalue())
    assert "sums after 4 turns [b]" in plain
    assert PINNED in plain
    if compare:
        (last,) = [line for line in plain.splitlines() if "tiny after 4" in line][-1:]
        assert last.index("sums after 4 turns [b]") < last.index("tiny after 4 turns [b]")
