"""A client that does not read its answer loses its connection; one that reads does not."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
import uvicorn

from headstart.server.wire import GuardedConnection

_ANSWER = 24 << 20  # more than the system's own buffers take


async def app(scope: Any, receive: Any, send: Any) -> None:
    size = _ANSWER if scope["path"] == "/large" else 50_000
    length = [(b"content-length", str(size).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": b"x" * size})


async def served(path: str, *, reads: bool) -> tuple[int, int]:
    """Connections that the server still has after a while, and bytes that the client got."""
    listener = socket.create_server(("127.0.0.1", 0))
    # A small buffer, so that 50 kB wait in the server.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    # On a busy machine reading takes longer than an idle connection has in the other cases.
    config = uvicorn.Config(
        app, http=GuardedConnection, lifespan="off", log_config=None,
        timeout_keep_alive=30 if reads else 1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop, got = asyncio.get_running_loop(), 0
    await loop.sock_connect(client, listener.getsockname())
    await loop.sock_sendall(client, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    if reads:
        while got < _ANSWER:
            got += len(await loop.sock_recv(client, 1 << 20))
        found = len(server.server_state.connections)
    else:
        await asyncio.sleep(1.6)
        found = len(server.server_state.connections)
    client.close()
    server.should_exit = True
    await running
    return found, got


@pytest.mark.parametrize(
    ("path", "reads", "connections"),
    [("/large", False, 0), ("/small", False, 0), ("/large", True, 1)],
    ids=["much", "little", "control"],
)
def test_who_does_not_read_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, path: str, reads: bool, connections: int
) -> None:
    monkeypatch.setattr("headstart.server.wire.STALL_SECONDS", 0.2)
    found, got = asyncio.run(served(path, reads=reads))
    assert found == connections and (got >= _ANSWER) is reads
