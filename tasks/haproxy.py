"""The configuration of HAProxy (2.8 or newer) in front of several engines of one base."""

from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from engine.catalog.opening import open_catalog
from engine.errors import ConfigError
from engine.settings.params import Params

# HAProxy keeps a body in one buffer until it is sent, since it may be sent again.
MOST_BODY = 1 << 20
# Beside the body: the headers and HAProxy's own records of the pieces.
BUFFER = MOST_BODY + (128 << 10)
CONFIGURATION = """\
# Written by `graftwork haproxy`. Write it again when an engine is added or removed.
global
    # A request under way may take two buffers.
    tune.bufsize {buffer}
    maxconn 2000

defaults
    mode http
    timeout connect 2s
    # A busy engine answers a check late.
    timeout check 5s
    timeout http-request 20s
    timeout http-keep-alive 60s
    timeout client 600s
    timeout server 600s
    # The engine stops computing for a client that has left.
    option abortonclose
    # A streamed token is passed on at once, not up to 0.2 s later with those behind it.
    option http-no-delay

frontend api
    bind {bind}
    option http-buffer-request
    # The rest of an engine's paths stays inside.
    http-request deny deny_status 404 unless {{ path_beg /v1/ }} || {{ path /health }}
    http-request deny deny_status 413 if {{ req.body_size gt {most} }}
    # A request that is sent again has the id of the first time, so it counts once.
    http-request set-header x-request-id %[uuid,regsub(-,,g)]
    http-request set-var(txn.policy) req.body,json_query('$.model'),field(1,@)
    use_backend living if {{ nbsrv(engines) eq 0 }}
    default_backend engines

backend engines
    # A policy's requests go to one engine, which has its revisions loaded, unless that has half as many again
    # under way as the mean.
    balance hash var(txn.policy)
    hash-type consistent
    hash-balance-factor 150
    # Only where no byte of an answer came. An answer of 5xx is passed on: the adapter may be at fault.
    retry-on conn-failure empty-response
    retries 2
    option redispatch 1
    option httpchk
    http-check send meth GET uri /graftwork/ready ver HTTP/1.1 hdr host localhost
    http-check expect status 200
    default-server check inter 500ms fall 2 rise 2
{servers}

# While none is ready, such as with the catalog out of reach, those that live go on answering.
backend living
    balance hash var(txn.policy)
    hash-type consistent
    retry-on conn-failure empty-response
    retries 2
    option redispatch 1
    option httpchk
    http-check send meth GET uri /health ver HTTP/1.1 hdr host localhost
    http-check expect status 200
    default-server check inter 500ms fall 2 rise 2
{servers}
"""


def configuration(params: Params, engines: Sequence[str], listen: str, certificate: Path | None) -> str:
    """Return HAProxy's configuration for engines at these URLs, or without any for those of the catalog.

    `listen` is ADDRESS:PORT. Raises `ConfigError` for a URL or an address that cannot be used, and for
    engines of several bases.
    """
    bind = _bind(listen, certificate)
    servers = [_server(url) for url in engines or _joined(params)]
    twice = {line for line in servers if servers.count(line) > 1}
    if twice:
        raise ConfigError(f"An engine is named twice:{twice.pop().partition('server')[2]}. Name each once.")
    return CONFIGURATION.format(buffer=BUFFER, most=MOST_BODY, bind=bind, servers="\n".join(servers))


def _joined(params: Params) -> list[str]:
    """Return the URLs of the catalog's engines."""
    with open_catalog(params.paths) as catalog:
        rows = catalog.replicas.all()
    if not rows:
        raise ConfigError("No engine is in the catalog. Start one, or name each with --engine URL.")
    if len({row.base for row in rows}) > 1:
        raise ConfigError(
            "The catalog's engines have several bases. Name those of one base with --engine URL."
        )
    return [row.url for row in rows]


def _bind(listen: str, certificate: Path | None) -> str:
    host, _, port = listen.rpartition(":")
    try:
        address = ip_address(host.strip("[]"))
        is_port = 1 <= int(port) <= 65535
    except ValueError:
        is_port = False
    if not is_port:
        raise ConfigError(f"--listen {listen!r} is no address. Write ADDRESS:PORT, such as 127.0.0.1:8470.")
    if certificate is None:
        if not address.is_loopback:
            raise ConfigError(
                f"--listen {listen} would take keys over the network in clear text. Give --certificate FILE, "
                "a PEM file with certificate chain and private key."
            )
        return listen
    if not certificate.is_absolute() or any(sign in str(certificate) for sign in " \"'\\#"):
        raise ConfigError(f"--certificate {certificate} must be an absolute path without spaces or quotes.")
    return f"{listen} ssl crt {certificate} alpn h2,http/1.1"


def _server(url: str) -> str:
    """Return the line of the engine at this URL, whose name is HOST_PORT."""
    parts = urlsplit(url)
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        port = None
    host = parts.hostname or ""
    is_plain = not (parts.path or parts.query or parts.fragment or parts.username)
    if not (port and is_plain and host and all(sign.isalnum() or sign in "-.:" for sign in host)):
        raise ConfigError(f"{url!r} is no engine's URL. Write http://HOST:PORT or https://HOST:PORT.")
    written = f"[{host}]" if ":" in host else host
    name = f"{host}_{port}".replace(":", "-")
    line = f"    server {name} {written}:{port}"
    if parts.scheme == "https":
        line += f" ssl verify required ca-file @system-ca verifyhost {host} sni str({host}) check-sni {host}"
    return line
