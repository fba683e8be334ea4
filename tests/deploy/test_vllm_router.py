"""vLLM's own router with the arguments of deploy/vllm-router.service, before small servers."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from engine.serving.gateway.reading import check_fields
from engine.serving.gateway.request_fields import CHAT, COMPLETION, Fields
from tests.helpers.fake_engines import Fake, Handler, two_fakes, well
from tests.helpers.router_process import arguments, routed

pytestmark = pytest.mark.services


@dataclass
class Site:
    """Two fakes, and a client of the router in front of them."""

    fakes: list[Fake]
    client: httpx.Client

    def ask(self, model: str, **more: object) -> httpx.Response:
        return self.client.post("/v1/completions", json={"model": model, "prompt": "2 + 2"} | more)

    @property
    def asked(self) -> int:
        return sum(len(fake.ids) for fake in self.fakes)

    def answer_with(self, model: str, status: int) -> None:
        """Have both fakes answer one model with this status, and all others well."""

        def one_fails(handler: Handler) -> None:
            handler.say(status if handler.model == model else 200)

        for fake in self.fakes:
            fake.answers = one_fails


@contextmanager
def site(tmp_path: Path, given: list[str]) -> Iterator[Site]:
    with (
        two_fakes() as fakes,
        routed([fake.url for fake in fakes], tmp_path, given) as url,
        httpx.Client(base_url=url, timeout=20) as client,
    ):
        yield Site(fakes, client)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("router"), arguments()) as found:
        yield found


@pytest.mark.parametrize("status", [424, 429, 503])
def test_one_policys_fault_harms_no_other(ours: Site, status: int) -> None:
    ours.answer_with("broken", status)
    before = ours.asked
    for _ in range(30):
        assert ours.ask("broken").status_code == status
    # Each once: it is not sent again.
    assert ours.asked == before + 30
    assert {ours.ask("well", user=f"u{n}").status_code for n in range(30)} == {200}


@pytest.mark.parametrize(
    ("path", "fields", "given"),
    [
        ("/v1/completions", COMPLETION, {"prompt": [1, 2], "ignore_eos": True, "return_token_ids": True}),
        ("/v1/chat/completions", CHAT, {"messages": [{"role": "user", "content": "2 + 2"}]}),
    ],
)
def test_the_gateway_takes_what_the_router_makes_of_a_request(
    ours: Site, path: str, fields: Fields, given: dict[str, object]
) -> None:
    """It writes bodies anew, with fields of its own."""
    for fake in ours.fakes:
        fake.answers, fake.body = well, {}
    assert ours.client.post(path, json={"model": "sums", "max_tokens": 4, "user": "u"} | given).is_success
    (body,) = (fake.body for fake in ours.fakes if fake.body)
    check_fields(body, fields)
    assert body.items() >= ({"model": "sums", "max_tokens": 4, "user": "u"} | given).items()


def test_limit_a_policys_requests_go_to_both_engines(ours: Site) -> None:
    for fake in ours.fakes:
        fake.answers = well
        fake.ids.clear()
    for _ in range(40):
        assert ours.ask("sums").status_code == 200
    assert all(fake.ids for fake in ours.fakes)


def test_an_engine_that_is_not_ready_gets_no_request(ours: Site) -> None:
    first, second = ours.fakes
    first.answers = second.answers = well
    first.is_ready = False
    deadline, seen = time.monotonic() + 60, -1
    while len(first.ids) != seen:
        assert time.monotonic() < deadline
        seen = len(first.ids)
        time.sleep(0.5)
        for _ in range(10):
            assert ours.ask("sums").status_code == 200
    first.is_ready = True


def test_limit_its_defaults_repeat_faults_and_take_every_engine_from_all(tmp_path: Path) -> None:
    with site(tmp_path, []) as found:
        found.answer_with("broken", 503)
        found.ask("broken")
        assert found.asked > 1
        for _ in range(5):
            found.ask("broken")
        assert 503 in {found.ask("well").status_code for _ in range(10)}
