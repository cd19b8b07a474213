"""What an HTTP server of the project grants to its clients: time, connections, and who may ask.

The servers live in processes that also write checkpoints, so clients must never take all file descriptors. They have no
passwords, so a web page opened on the same machine must not reach them: not by its own name rebound to this address
(the Host tells), nor across origins (the Origin tells).
"""

from __future__ import annotations

import ipaddress
import resource
import socket
from http import HTTPStatus
from urllib.parse import urlsplit

IDLE_S = 30.0
"""The head of a request is whole within this of the connection's start, or of the answer to the last request."""
READ_S = 60.0
"""A request's body is whole within this of its head. Its answer may take hours."""
MAX_CONNECTIONS = 1024

_BUSY_BODY = b'{"error": {"message": "too many open connections; try again later", "type": "overloaded"}}'
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_BUSY_BODY), _BUSY_BODY)
)
"""The whole answer to a connection over the bound."""


def most_connections() -> int:
    """How many connections a server keeps open: at most a quarter of the descriptors the process may have."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if descriptors == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, descriptors // 4))


def stranger(host: str | None, origin: str | None, *, bound: str) -> tuple[HTTPStatus, str] | None:
    """Why a request is refused, as a status and a message; None when it is not.

    Args:
        host: the Host header. Only HTTP/1.0 may do without it, which no browser speaks.
        origin: the Origin header; only the server's own passes.
        bound: the name or address that the server was told to listen on.
    """
    if host is not None and not _is_own(host, bound):
        message = f"this server is not {host!r}: use its IP address, localhost or {socket.gethostname()}"
        return HTTPStatus.MISDIRECTED_REQUEST, message
    if origin is not None and (
        host is None or origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower())
    ):
        return HTTPStatus.FORBIDDEN, f"web pages of {origin!r} may not ask this server"
    return None


def _is_own(host: str, bound: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
        if name in {"localhost", bound.lower(), socket.gethostname().lower()}:
            return True
        ipaddress.ip_address(name or "")  # an address cannot be rebound, only names can
    except ValueError:
        return False
    return True
