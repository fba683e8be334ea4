"""The port of a service, bound before anything is loaded."""

import socket

from engine.errors import PortInUse
from engine.settings.services import Listener


def bind(listener: Listener, service: str) -> socket.socket:
    """Return a socket bound to a service's address; it does not listen yet.

    Raises `PortInUse` where another program listens there, or the machine has no such address.
    """
    family = socket.AF_INET if listener.listen.version == 4 else socket.AF_INET6
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((str(listener.listen), listener.port))
    except OSError as error:
        server.close()
        raise PortInUse(
            f"Port {listener.port} of the {service} service cannot be had at {listener.listen} "
            f"({error.strerror}). Stop the program that listens there, or set `{service}.port` in "
            "params.yaml."
        ) from None
    return server
