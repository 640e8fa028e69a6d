"""Connections: of clients that do not read, and parts of answers written past all layers."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from headstart.server.wire import (
    _CYCLE,
    GuardedConnection,
    PartWriter,
    begin_stream,
    send_part,
)

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


async def parted(scope: Any, receive: Any, send: Any) -> None:
    """Parts by turns through all layers and past them, where that can be; then how many were."""
    parts, num_written = PartWriter.of(scope), 0
    await begin_stream(send)
    for number in range(2000):
        data = b"%d " % number * 40
        if number % 2 and parts is not None and parts.is_ready:
            parts.write(data)
            num_written += 1
        else:
            await send_part(send, data)
    await send_part(send, b"end %d" % num_written, is_last=True)


async def answered(version: str, *, pause: float) -> tuple[bytes, bytes]:
    """Head and body of the answer to a client that begins to read after a while."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    config = uvicorn.Config(parted, http=GuardedConnection, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname(), limit=4096)
    writer.write(f"GET / HTTP/{version}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    await asyncio.sleep(pause)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    server.should_exit = True
    await running
    return head, body


def joined(chunks: bytes) -> bytes:
    """The body that chunks of HTTP/1.1 hold."""
    body = b""
    while size := int(chunks[: chunks.index(b"\r\n")], 16):
        start = chunks.index(b"\r\n") + 2
        body, chunks = body + chunks[start : start + size], chunks[start + size + 2 :]
    return body


@pytest.mark.parametrize(
    ("version", "pause", "written"),
    [("1.1", 0.0, range(1, 1001)), ("1.1", 0.5, range(1, 1000)), ("1.0", 0.0, range(1))],
    ids=["reads at once", "reads late", "without chunks"],
)
def test_parts_written_past_the_layers_come_in_order(
    version: str, pause: float, written: range
) -> None:
    head, body = asyncio.run(answered(version, pause=pause))
    assert (b"transfer-encoding: chunked" in head.lower()) == (version == "1.1")
    body = joined(body) if version == "1.1" else body
    text, _, count = body.rpartition(b"end ")
    assert text == b"".join(b"%d " % number * 40 for number in range(2000))
    assert int(count) in written


@pytest.mark.parametrize(
    "gone",
    ["flow", "flow.write_paused", "disconnected", "response_complete", "transport.write", None],
)
def test_parts_go_through_all_layers_where_uvicorn_calls_things_differently(
    gone: str | None,
) -> None:
    """Its names for these are no public interface."""
    flow, transport = SimpleNamespace(write_paused=False), SimpleNamespace(write=None)
    cycle = SimpleNamespace(
        flow=flow, disconnected=False, response_complete=False, transport=transport
    )
    if gone is not None:
        of, _, name = gone.rpartition(".")
        delattr(getattr(cycle, of) if of else cycle, name)
    parts = PartWriter.of({"http_version": "1.1", _CYCLE: lambda: cycle})
    assert (parts is None) is (gone is not None)


def test_a_part_has_some_bytes() -> None:
    """A chunk of none would end the answer."""
    written: list[bytes] = []
    cycle: Any = SimpleNamespace(transport=SimpleNamespace(write=written.append))
    parts = PartWriter(cycle)
    parts.write(b"ab")
    with pytest.raises(AssertionError, match="no bytes"):
        parts.write(b"")
    assert written == [b"2\r\nab\r\n"]
