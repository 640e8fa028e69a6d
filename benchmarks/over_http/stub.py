"""A server that streams as fast as it can, to see what the client can take.

python stub.py   writes its port, then answers every POST with `max_tokens` events, one per token
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

_EVENT = {
    "id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1700000000,
    "model": "default", "system_fingerprint": "stub",
    "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
    "usage": None,
}  # fmt: skip
_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    b"Connection: close\r\n\r\n"
)
_EVERY = 0.02  # seconds between two looks at what is still to be read


def _chunk(text: str) -> bytes:
    data = f"data: {text}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    tokens = json.loads(await reader.readexactly(size))["max_tokens"]
    event, usage = _chunk(json.dumps(_EVENT)), {"completion_tokens": tokens}
    writer.write(_HEAD)
    for _ in range(tokens):
        writer.write(event)
        await asyncio.sleep(0)  # the other streams: every event is a write of its own
        await writer.drain()
    last: dict[str, Any] = {**_EVENT, "choices": [], "usage": usage}
    writer.write(_chunk(json.dumps(last)) + _chunk("[DONE]") + b"0\r\n\r\n")
    await writer.drain()
    writer.close()


async def _main() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    began = time.monotonic()
    while time.monotonic() - began < 600:  # forgotten stubs end
        await asyncio.sleep(_EVERY)


if __name__ == "__main__":
    asyncio.run(_main())
