"""What stands before a service: the key, the Host allow-list, and where it may listen."""

from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from engine.catalog.catalog import migrate
from engine.errors import ConfigError
from engine.security.http import guarded, server_options
from engine.serving.server import listener_arguments
from engine.settings.params import Params, load_params
from engine.settings.services import Listener
from tasks import mlflow_server

KEY = "a" * 48


def client(listener: Listener, host: str = "127.0.0.1") -> TestClient:
    app = FastAPI()

    @app.get("/health")
    @app.get("/secret")
    def answer() -> str:
        return "here"

    return TestClient(guarded(app, listener, KEY), base_url=f"http://{host}:8461")


def listener(listen: str = "127.0.0.1", **network: Any) -> Listener:
    return Params.model_validate({"trainer": {"listen": listen}, "network": network}).listener("trainer")


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/health", "", 200),
        ("/secret", "", 401),
        ("/absent", "", 401),
        ("/health/../secret", "", 401),
        ("/secret", "Bearer wrong", 401),
        ("/secret", f"Basic {KEY}", 401),
        ("/secret", f"Bearer {KEY}", 200),
        ("/secret", f"bearer  {KEY}", 200),
        ("/absent", f"Bearer {KEY}", 404),
    ],
)
def test_only_health_needs_no_key(path: str, header: str, status: int) -> None:
    with client(listener()) as http:
        answer = http.get(path, headers={"authorization": header})
    assert answer.status_code == status
    assert (status == 401) == ("www-authenticate" in answer.headers)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost", 200),
        ("LOCALHOST", 200),
        ("models.example.org", 200),
        # A web page of that name whose address turns into 127.0.0.1: DNS rebinding.
        ("evil.example.org", 400),
        ("127.0.0.1.evil.example.org", 400),
        ("10.0.0.7", 400),
    ],
)
def test_a_name_that_is_not_ours_is_refused(host: str, status: int) -> None:
    with client(listener(hosts=["models.example.org"]), host) as http:
        assert http.get("/health").status_code == status
        assert http.get("/secret", headers={"authorization": f"Bearer {KEY}"}).status_code == status


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1"])
def test_loopback_needs_no_tls(address: str) -> None:
    found = server_options(listener(listen=address))
    assert (found["host"], found["port"]) == (address, 8461)
    assert not any(name.startswith("ssl") for name in found)


@pytest.mark.parametrize("address", ["0.0.0.0", "10.0.0.7", "::", "192.168.1.4"])
def test_any_other_address_needs_tls_or_a_proxy(tmp_path: Path, address: str) -> None:
    file = tmp_path / "params.yaml"
    for service in ("engine", "trainer", "controller", "mlflow", "prefect"):
        file.write_text(f'{service}: {{listen: "{address}"}}\n')
        with pytest.raises(ConfigError, match=rf"listen: {address}.*`network.tls_certificate`"):
            load_params(file)
        file.write_text(f'{service}: {{listen: "{address}"}}\nnetwork: {{behind_proxy: true}}\n')
        assert str(load_params(file).listener(service).listen) == address
    with pytest.raises(ValueError, match="both `tls_certificate`"):
        listener(listen=address, tls_certificate="/c.pem")
    with pytest.raises(ValueError, match="absolute paths"):
        listener(listen=address, tls_certificate="c.pem", tls_key="/k.pem")


@pytest.mark.parametrize("service", ["engine", "trainer", "controller", "mlflow", "prefect"])
def test_a_url_without_a_scheme_is_a_sentence_with_an_example(tmp_path: Path, service: str) -> None:
    file = tmp_path / "params.yaml"
    file.write_text(f'{service}: {{at: "10.0.0.7:8462"}}\n')
    with pytest.raises(ConfigError, match=rf"`{service}\.at`.*\bhost\b"):
        load_params(file)
    file.write_text('store: {url: "bucket/adapters"}\n')
    with pytest.raises(ConfigError, match=r"`store\.url`.*s3://"):
        load_params(file)
    with pytest.raises(ConfigError, match=r"'db\.example/graftwork'.*sqlite:"):
        migrate("db.example/graftwork")


def test_tls_reaches_every_server() -> None:
    tls = {"tls_certificate": "/c.pem", "tls_key": "/k.pem", "hosts": ["models.example.org"]}
    mine = listener(listen="0.0.0.0", **tls)
    assert mine.url == "https://models.example.org:8461"
    assert server_options(mine)["ssl_certfile"] == "/c.pem"
    assert listener_arguments(mine)[-4:] == ["--ssl-certfile", "/c.pem", "--ssl-keyfile", "/k.pem"]
    served = Params.model_validate({"mlflow": {"listen": "0.0.0.0"}, "network": tls})
    assert mlflow_server.options(served)[-1] == "--ssl-certfile /c.pem --ssl-keyfile /k.pem"
    assert listener(listen="0.0.0.0", behind_proxy=True).url == "http://127.0.0.1:8461"
    assert listener(listen="::1").url == "http://[::1]:8461"
    # What listens on a loopback address has the certificate's name for nobody.
    inner = listener(**tls)
    assert (inner.url, inner.tls) == ("http://127.0.0.1:8461", None)
    assert "models.example.org" in inner.names


def test_settings_survive_their_own_file(tmp_path: Path) -> None:
    """The services read what `up` writes."""
    params = Params.model_validate(
        {"state_dir": tmp_path, "engine": {"listen": "::1"}, "network": {"hosts": ["a.example"]}}
    )
    (tmp_path / "params.json").write_text(params.to_json())
    found = load_params(tmp_path / "params.json")
    assert (found.engine, found.network) == (params.engine, params.network)
