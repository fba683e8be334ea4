"""The certificates that HTTP clients trust, read once: to read them takes longer than most requests."""

import ssl
from functools import cache

import httpx


@cache
def context() -> ssl.SSLContext:
    """Return what every client of this process may share."""
    return httpx.create_ssl_context()
