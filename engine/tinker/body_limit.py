"""A limit on the bytes of a request, sent and unpacked."""

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import ConfigError

# The SDK cuts its calls into requests of 5 MB; a client may be told otherwise.
MOST_BYTES = 64 << 20
# Of every other call: JSON takes many times its bytes when it is parsed.
MOST_JSON = 8 << 20
GRADIENTS = "/api/v1/forward_backward"


class BodyLimit:
    """Answer 413 to a request whose body is over the limit, without reading the rest of it."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count the bytes of its body."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        seen, most = 0, MOST_BYTES if scope["path"] == GRADIENTS else MOST_JSON

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > most:
                # Of all exceptions while a body is read FastAPI passes this one on.
                raise HTTPException(413, f"The body is over {most >> 20} MiB. Send fewer data in a request.")
            return message

        await self.app(scope, counted, send)


def decompressed(body: bytes, encoding: str) -> bytes:
    """Return a body unpacked. Raises `ConfigError` for an unknown encoding, and above the limit."""
    if not encoding or encoding == "identity":
        return body
    import zstandard

    if encoding != "zstd":
        raise ConfigError(f"The content encoding {encoding[:32]!r} is not supported. Use zstd, or none.")
    try:
        with zstandard.ZstdDecompressor(max_window_size=MOST_BYTES).stream_reader(body) as reader:
            unpacked = reader.read(MOST_BYTES + 1)
    except zstandard.ZstdError:
        raise ConfigError("The body is not valid zstd. Send it again, or without compression.") from None
    if len(unpacked) > MOST_BYTES:
        raise ConfigError(f"The body unpacks to over {MOST_BYTES >> 20} MiB. Send fewer data in a request.")
    return unpacked
