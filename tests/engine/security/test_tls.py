"""A service of ours over TLS, on every address of the machine: the controller in a process of its own."""

import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from engine.catalog.catalog import Base, Policy
from engine.catalog.opening import open_catalog
from engine.clients.controller import ControllerClient
from engine.clients.http_client import certificates
from engine.errors import NotFound, ServiceError
from engine.security.credentials import credential
from engine.settings.params import Params, load_params
from tests.helpers.access_matrix import CONTROLLER, ROLE_SETS, Names, refusals
from tests.helpers.certificates import write_certificate
from tests.helpers.live import free_port

pytestmark = pytest.mark.services


def is_answering(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Params]:
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = write_certificate(folder, "localhost")
    settings = {
        "state_dir": str(folder / "state"),
        "controller": {"port": free_port(), "listen": "0.0.0.0"},
        "network": {"hosts": ["localhost"], "tls_certificate": str(certificate), "tls_key": str(key)},
    }
    file = folder / "params.json"
    file.write_text(json.dumps(settings))
    params = load_params(file)
    command = [sys.executable, "-m", "engine.controller", "--params", str(file)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None and not is_answering(params.controller.port):
            time.sleep(0.05)
        yield params
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_our_client_trusts_the_authority_that_the_environment_names(
    service: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service.url("controller").startswith("https://localhost:")
    key = credential(service.paths, "controller")
    monkeypatch.setenv("SSL_CERT_FILE", str(service.network.tls_certificate))
    certificates.cache_clear()
    with ControllerClient(service.url("controller"), key) as client:
        assert client.is_healthy()
        with pytest.raises(NotFound, match="no release 'r1'"):
            client.release("r1")
    monkeypatch.delenv("SSL_CERT_FILE")
    certificates.cache_clear()
    with (
        ControllerClient(service.url("controller"), key, patience_s=0) as client,
        pytest.raises(ServiceError),
    ):
        client.release("r1")
    assert "SSL_CERT_FILE" not in os.environ


def test_the_matrix_of_the_live_controller(service: Params) -> None:
    """A key of any role but `admin` calls nothing; `metrics` reads `/metrics`."""
    with open_catalog(service.paths) as catalog:
        keys = {who: catalog.keys.create("acme", roles, ["acme-*"]) for who, roles in ROLE_SETS.items()}
        keys |= {"none": None, "bad": "gw-" + "0" * 40}
        catalog.bases.add(Base("base", "tiny", "/tiny", 0.0))
        catalog.policies.add(Policy("their-sums", "base", {}, "other", 0.0))
        admin = catalog.keys.create("root", "admin")
    trust = ssl.create_default_context(cafile=str(service.network.tls_certificate))
    names = Names("acme-sums", "their-sums", "absent-sum")

    def client(key: str | None) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=service.url("controller"), verify=trust, headers=headers, timeout=20)

    for who, key in keys.items():
        with client(key) as http:
            allowed = ["/metrics"] if who == "metrics" else []
            assert refusals(http, CONTROLLER, names, allowed) == [], who
            assert [http.get(path).status_code for path in allowed] == [200] * len(allowed)
    with client(admin) as http:
        for method, path in CONTROLLER:
            # An empty body changes nothing.
            assert http.request(method, path, json={}).status_code in (200, 400, 404), (method, path)


def test_plain_http_is_not_answered(service: Params) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        # A pause of the machine is no refusal.
        httpx.get(f"http://127.0.0.1:{service.controller.port}/health", trust_env=False, timeout=60)
