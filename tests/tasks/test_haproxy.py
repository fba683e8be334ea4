"""The written configuration on a real HAProxy, in front of small servers that stand for engines."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from engine.catalog.catalog import Replica, migrate
from engine.catalog.opening import whole_catalog
from engine.errors import ConfigError
from engine.settings.params import Params
from tasks.haproxy import MOST_BODY, configuration
from tests.helpers.command_line import graftwork
from tests.helpers.fake_engines import Fake, Handler, two_fakes, well
from tests.helpers.haproxy import balanced

pytestmark = pytest.mark.services
POLICIES = [f"policy-{number}" for number in range(16)]


@dataclass
class Site:
    """Two fakes, and a client of HAProxy in front of them."""

    fakes: list[Fake]
    client: httpx.Client

    def ask(self, model: str, **more: object) -> httpx.Response:
        return self.client.post("/v1/completions", json={"model": model, "prompt": "2 + 2"} | more)

    def home(self, model: str) -> Fake:
        """Return the fake that answers this model."""
        url = self.ask(model).json()["from"]
        return next(fake for fake in self.fakes if fake.url == url)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with (
        two_fakes() as fakes,
        balanced(Params(), [fake.url for fake in fakes], tmp_path) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield Site(fakes, client)


def test_a_policys_requests_go_to_one_engine(site: Site) -> None:
    homes = {policy: site.home(policy).url for policy in POLICIES}
    assert len(set(homes.values())) == 2
    for policy, home in homes.items():
        assert site.home(f"{policy}@3f9c1b22a0de").url == home


def test_a_busy_policy_takes_the_other_engine_too(site: Site) -> None:
    busy, release = threading.Semaphore(0), threading.Event()

    def slow(handler: Handler) -> None:
        busy.release()
        release.wait(60)
        handler.say(200)

    for fake in site.fakes:
        fake.answers = slow
    threads = [threading.Thread(target=site.ask, args=("policy",)) for _ in range(8)]
    for one in threads:
        one.start()
    for _ in threads:
        assert busy.acquire(timeout=60)
    counts = sorted(len(fake.ids) for fake in site.fakes)
    release.set()
    for one in threads:
        one.join()
    assert counts[0] >= 2
    assert sum(counts) == 8


def test_a_request_without_an_answer_is_sent_to_the_other_engine_with_its_id(site: Site) -> None:
    home = site.home("sums")
    other = next(fake for fake in site.fakes if fake is not home)
    home.answers = Handler.vanish
    answer = site.ask("sums")
    assert answer.status_code == 200
    assert answer.json()["from"] == other.url
    assert home.ids[-1] == other.ids[-1]
    assert len(other.ids[-1]) == 32


def test_no_client_chooses_its_requests_id(site: Site) -> None:
    home = site.home("sums")
    site.client.post("/v1/completions", json={"model": "sums"}, headers={"x-request-id": "a" * 32})
    assert home.ids[-1] != "a" * 32
    assert len(set(home.ids)) == 2


@pytest.mark.parametrize("status", [424, 429, 500, 503])
def test_an_adapters_fault_is_no_fault_of_its_engine(site: Site, status: int) -> None:
    home = site.home("sums")
    others = [policy for policy in POLICIES if site.home(policy) is home]
    assert others
    for fake in site.fakes:
        fake.answers = lambda handler: handler.say(status)
    before = sum(len(fake.ids) for fake in site.fakes)
    for _ in range(30):
        assert site.ask("sums").status_code == status
    # Each once: it is not sent again.
    assert sum(len(fake.ids) for fake in site.fakes) == before + 30
    for fake in site.fakes:
        fake.answers = well
    assert {site.home(policy).url for policy in others} == {home.url}


def test_a_cut_stream_is_an_error_of_its_client(site: Site) -> None:
    site.home("sums").answers = Handler.cut_stream
    with pytest.raises(httpx.RemoteProtocolError):
        site.ask("sums", stream=True)


def test_a_streams_first_token_is_not_held_back(site: Site) -> None:
    release = threading.Event()

    def held(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"5\r\nfirst\r\n")
        handler.wfile.flush()
        release.wait(60)
        handler.wfile.write(b"4\r\nlast\r\n0\r\n\r\n")

    for fake in site.fakes:
        fake.answers = held
    waited = []
    # The kernel holds small packets for 0.2 s where HAProxy lets it, and then each of them; a busy machine
    # may delay some for as long.
    while len(waited) < 50 and min(waited, default=1.0) >= 0.1:
        release.clear()
        began = time.monotonic()
        with site.client.stream("POST", "/v1/completions", json={"model": "sums"}) as response:
            pieces = response.iter_bytes()
            assert next(pieces) == b"first"
            waited.append(time.monotonic() - began)
            release.set()
            assert b"".join(pieces) == b"last"
    assert min(waited) < 0.1


def test_an_engine_that_is_not_ready_gets_no_request(site: Site) -> None:
    home = site.home("sums")
    home.is_ready = False
    deadline = time.monotonic() + 60
    while site.home("sums") is home:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    seen = len(home.ids)
    for _ in range(20):
        assert site.ask("sums").status_code == 200
    assert len(home.ids) == seen
    home.is_ready = True
    while site.home("sums") is not home:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_long_body_is_413_and_the_longest_one_passes(site: Site) -> None:
    def body(length: int) -> bytes:
        frame = b'{"model": "sums", "prompt": ""}'
        return frame[:-2] + b"a" * (length - len(frame)) + frame[-2:]

    home = site.home("sums")
    longest = site.client.post("/v1/completions", content=body(MOST_BODY))
    assert (longest.status_code, longest.json()["from"]) == (200, home.url)
    seen = [len(fake.ids) for fake in site.fakes]
    longer = body(MOST_BODY + 1)
    assert site.client.post("/v1/completions", content=longer).status_code == 413
    # Without a length, in chunks.
    chunks = (longer[at : at + 65_536] for at in range(0, len(longer), 65_536))
    assert site.client.post("/v1/completions", content=chunks).status_code == 413
    assert [len(fake.ids) for fake in site.fakes] == seen


def test_only_the_api_is_behind_haproxy(site: Site) -> None:
    assert site.client.get("/health").status_code == site.client.get("/v1/models").status_code == 200
    for path in ("/graftwork/drain", "/graftwork/ready", "/metrics", "/"):
        assert site.client.get(path).status_code == 404


def test_the_command_writes_the_catalogs_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "params.yaml"
    file.write_text(f"state_dir: {tmp_path}\n")
    migrate(f"sqlite:///{tmp_path}/catalog.db")
    with whole_catalog(f"sqlite:///{tmp_path}/catalog.db") as catalog:
        told = graftwork("haproxy", "--params", file)
        assert told.returncode != 0
        assert "No engine" in told.stderr
        for number in (1, 2):
            url = f"http://10.0.0.{number}:8460"
            catalog.replicas.join(Replica(f"e{number}", url, "base", "1", "x", 0, 0.0, draining=False))
        told = graftwork("haproxy", "--params", file)
        assert told.returncode == 0
        assert "server 10.0.0.1_8460 10.0.0.1:8460\n    server 10.0.0.2_8460 10.0.0.2:8460" in told.stdout
        catalog.replicas.join(
            Replica("e3", "http://10.0.0.3:8460", "other", "1", "x", 0, 0.0, draining=False)
        )
    told = graftwork("haproxy", "--params", file)
    assert told.returncode != 0
    assert "several bases" in told.stderr


@pytest.mark.parametrize(
    ("engines", "listen", "certificate", "said"),
    [
        (["10.0.0.1:8460"], "127.0.0.1:8470", None, "engine's URL"),
        (["http://a b:8460"], "127.0.0.1:8470", None, "engine's URL"),
        (["http://a:99999"], "127.0.0.1:8470", None, "engine's URL"),
        (["http://a:8460/v1"], "127.0.0.1:8470", None, "engine's URL"),
        (["http://a:8460", "http://a:8460"], "127.0.0.1:8470", None, "named twice"),
        (["http://a:8460"], "8470", None, "is no address"),
        (["http://a:8460"], "127.0.0.1:0", None, "is no address"),
        (["http://a:8460"], "0.0.0.0:443", None, "in clear text"),
        (["http://a:8460"], "0.0.0.0:443", Path("a.pem"), "an absolute path"),
        (["http://a:8460"], "0.0.0.0:443", Path("/a\n b.pem"), "an absolute path"),
    ],
)
def test_bad_input_is_refused(engines: list[str], listen: str, certificate: Path | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        configuration(Params(), engines, listen, certificate)


def test_https_outside_and_inside_is_written() -> None:
    text = configuration(Params(), ["https://e.example:8460"], "0.0.0.0:443", Path("/etc/tls/all.pem"))
    assert "bind 0.0.0.0:443 ssl crt /etc/tls/all.pem" in text
    assert "server e.example_8460 e.example:8460 ssl verify required" in text
