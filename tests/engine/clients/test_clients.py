"""The clients of our services: what is asked, what is asked again, and how faults are raised."""

import json
import socket
from collections.abc import Callable

import httpx
import pytest

from engine.clients.controller import ControllerClient
from engine.clients.engine import EngineClient
from engine.clients.http_client import ServiceClient, connect
from engine.errors import (
    AdapterError,
    Busy,
    ConfigError,
    Conflict,
    Gone,
    NotFound,
    NotRunning,
    ServiceError,
    Unauthorized,
)
from tests.helpers.live import free_port

Answers = Callable[[httpx.Request], httpx.Response]


def served(client: ServiceClient, answers: Answers) -> list[httpx.Request]:
    """Let a function answer this client; return the requests that it gets, as they come."""
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return answers(request)

    headers = client.http.headers
    client.http = httpx.Client(base_url=client.url, headers=headers, transport=httpx.MockTransport(handle))
    return seen


def always(status: int, body: object) -> Answers:
    return lambda request: httpx.Response(status, json=body)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, ConfigError), (401, Unauthorized), (404, NotFound), (409, Conflict), (500, ServiceError),
     (503, ServiceError)],
)  # fmt: skip
def test_a_refusal_is_the_class_of_its_status_in_the_controllers_words(status: int, kind: type) -> None:
    client = ControllerClient("http://controller", "gw-key")
    seen = served(client, always(status, {"error": "It says why."}))
    with pytest.raises(kind, match=r"^It says why\.$") as raised:
        client.decide("promote", "better", by="ada", policy="sums", digest="ab")
    assert type(raised.value) is kind
    assert seen[0].headers["authorization"] == "Bearer gw-key"
    assert json.loads(seen[0].content) == {"policy": "sums", "digest": "ab", "reason": "better", "by": "ada"}
    # A refusal is asked for once.
    assert len(seen) == 1


@pytest.mark.parametrize(("status", "kind"), [(404, NotFound), (410, Gone), (422, AdapterError), (429, Busy)])
def test_the_engines_refusal_of_log_probabilities_is_its_sentence(status: int, kind: type) -> None:
    client = EngineClient("http://engine", "gw-key", "probe")
    seen = served(client, always(status, {"error": {"message": "No such thing.", "code": status}}))
    with pytest.raises(kind, match=r"^No such thing\.$") as raised:
        client.logprobs("sums@ab", (1, 2))
    assert type(raised.value) is kind
    assert seen[0].headers["x-graftwork-purpose"] == "probe"


def test_an_answer_that_is_not_ours_is_quoted() -> None:
    client = ControllerClient("http://controller")
    served(client, lambda request: httpx.Response(502, text="<html>Bad gateway</html>"))
    with pytest.raises(ServiceError, match=r"502.*<html>Bad gateway"):
        client.release("r1")


def test_log_probabilities_are_those_of_all_tokens_but_the_first() -> None:
    client = EngineClient("http://engine")
    told = [None, {"7": {"logprob": -1.5}, "9": {"logprob": -0.1}}, {"8": {"logprob": -2.5}}]
    served(client, always(200, {"choices": [{"prompt_logprobs": told}]}))
    assert client.logprobs("tiny", [5, 7, 8]) == [-1.5, -2.5]


def test_an_engine_without_the_plugin_is_a_service_at_fault() -> None:
    client = EngineClient("http://engine")
    served(client, always(404, {"detail": "Not Found"}))
    with pytest.raises(ServiceError, match="without Graftwork's plugin"):
        client.marker()


@pytest.mark.long
def test_samples_are_asked_for_again_while_the_engine_is_full_or_away() -> None:
    client = EngineClient("http://engine", patience_s=30)
    faults = iter([httpx.ConnectError("refused"), 503, 429, 500])

    def answer(request: httpx.Request) -> httpx.Response:
        fault = next(faults, None)
        if isinstance(fault, Exception):
            raise fault
        return httpx.Response(fault or 200, json={"samples": [{"tokens": [3]}]})

    seen = served(client, answer)
    assert client.samples({"model": "sums"}) == {"samples": [{"tokens": [3]}]}
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("status", "kind", "says"),
    [
        (400, ConfigError, r"400.*engine\.max_model_len"),
        (403, ConfigError, "with 403"),
        (404, NotFound, "'sums'"),
        (422, ConfigError, "with 422"),
    ],
)
def test_samples_that_are_refused_are_asked_for_once(status: int, kind: type, says: str) -> None:
    client = EngineClient("http://engine", patience_s=30)
    seen = served(client, always(status, {"error": {"message": "No."}}))
    with pytest.raises(kind, match=says):
        client.samples({"model": "sums"})
    assert len(seen) == 1


def test_a_controller_that_comes_back_is_asked_again() -> None:
    client = ControllerClient("http://controller")
    faults = iter([httpx.ConnectError("refused"), httpx.ReadError("cut off")])

    def answer(request: httpx.Request) -> httpx.Response:
        for fault in faults:
            raise fault
        return httpx.Response(200, json=[{"id": "r1", "state": "held"}, {"id": "r2", "state": "running"}])

    seen = served(client, answer)
    assert client.running_release("a policy&more")["id"] == "r2"
    assert seen[-1].url.params["policy"] == "a policy&more"


def test_nothing_there_and_no_answer_are_told_apart() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with EngineClient(url) as client, pytest.raises(NotRunning, match=f"engine.*{url}"):
        client.residency()
    with socket.create_server(("127.0.0.1", 0)) as busy:
        url = f"http://127.0.0.1:{busy.getsockname()[1]}"
        with EngineClient(url, timeout_s=0.1) as client, pytest.raises(ServiceError) as raised:
            client.residency()
        assert not isinstance(raised.value, NotRunning)
        with ServiceClient("engine", url, timeout_s=0.1) as client:
            assert not client.is_healthy()


def test_alarms_are_read_also_from_one_that_stands_still() -> None:
    client = ControllerClient("http://controller")
    served(client, always(503, {"status": "stalled", "alarms": ["the loop stands still"]}))
    assert client.alarms() == ["the loop stands still"]
    with ControllerClient(f"http://127.0.0.1:{free_port()}") as nobody:
        assert nobody.alarms() == []


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    with connect("http://127.0.0.1:1") as client:
        assert not client.trust_env
        assert client._mounts == {}
