"""The port, taken before anything large is imported or loaded: a busy one is said at once."""

from __future__ import annotations

import socket

from headstart.errors import ConfigError
from headstart.server.limits import ServerOptions

_BACKLOG = 2048


def listen(options: ServerOptions) -> socket.socket:
    """A socket that accepts connections; ConfigError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off only where it sees TCP:
    # small events would otherwise wait for the client's acknowledgement, 40 ms each.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
        listener.listen(_BACKLOG)  # only now nobody else can take it
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {options.host}:{options.port} ({error.strerror}); give another "
            "--host or --port."
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Where this machine reaches it."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
