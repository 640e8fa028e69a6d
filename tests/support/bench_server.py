"""A server that writes at given times: the truth that a benchmark's figures are held to.

In a test: `with serving(Script(...)) as server`. As a process of its own, so that it does not share
an interpreter with what measures it: `python bench_server.py '{"first_seconds": 0.1, ...}'`, which
prints its port.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, cycle
from typing import Any

_HEAD = b"HTTP/1.1 %d X\r\nContent-Type: %s\r\n%s\r\n"
_STREAM = b"Transfer-Encoding: chunked\r\n"
_LAST = b"0\r\n\r\n"


@dataclass
class Script:
    """When chunks go out, how many tokens they hold, and how the server says so."""

    first_seconds: float = 0.0
    gap_seconds: float = 0.0
    tokens_per_chunk: tuple[int, ...] = (1,)  # again and again; the first chunk has one
    says: str = "token_ids"  # or usage, origins, total, nothing
    refuses: tuple[str, ...] = ()  # fields that it does not know
    prompt_tokens: int = 7
    cached_tokens: int = 0
    # What happens to a request, by its last message or prompt: a kind of failure, or None.
    fails: Callable[[str], str | None] = lambda prompt: None
    metrics: Callable[[int], str] | None = None  # by the number of requests so far
    extra: dict[str, Any] = field(default_factory=dict)  # in the last chunk
    word: str = "word "
    key: str | None = None  # that clients must send
    refuses_chat: str = ""  # what is said to whoever wants to chat
    pages: dict[str, dict[str, Any]] = field(default_factory=dict)  # by path, as JSON
    vocabulary: tuple[str, ...] = ()  # of /tokenize and /detokenize; the first is the unknown word

    def chunk_sizes(self, num_tokens: int) -> list[int]:
        sizes, left, pattern = [1], num_tokens - 1, cycle(self.tokens_per_chunk)
        while left > 0:
            sizes.append(min(next(pattern), left))
            left -= sizes[-1]
        return sizes


class BenchServer:
    """What it was asked, and what it does."""

    def __init__(self, script: Script):
        self.script = script
        self.asked: list[dict[str, Any]] = []
        # By prompt: when it arrived, and each chunk's tokens and when it really went out.
        self.log: dict[str, tuple[float, list[tuple[int, float]]]] = {}
        self.most_open = self._num_open = 0
        self.port = 0
        self._payloads: dict[tuple[bool, int], bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                arrived = time.perf_counter()
                path = head.split()[1]
                lines = head.lower().split("\r\n")
                sizes = [int(x.split(":")[1]) for x in lines if x.startswith("content-length:")]
                body = json.loads(await reader.readexactly(sizes[0])) if sizes else {}
                if self.script.key and f"authorization: bearer {self.script.key}" not in lines:
                    writer.write(_whole(401, {"error": {"message": "Give a key."}}))
                    continue
                if path != "/v1/chat/completions" and path != "/v1/completions":
                    writer.write(self._plain(path, body))
                    continue
                self._num_open += 1
                self.most_open = max(self.most_open, self._num_open)
                try:
                    if not await self._answer(body, path, arrived, writer):
                        return
                finally:
                    self._num_open -= 1
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # the client has gone, or the server goes
        finally:
            writer.close()

    def _plain(self, path: str, body: dict[str, Any]) -> bytes:
        words = self.script.vocabulary
        if path == "/tokenize" and words:
            ids = [words.index(w) if w in words else 0 for w in body["prompt"].split()]
            return _whole(200, {"tokens": ids, "count": len(ids)})
        if path == "/detokenize" and words and max(body["tokens"]) < len(words):
            return _whole(200, {"prompt": " ".join(words[token] for token in body["tokens"])})
        if path in self.script.pages:
            return _whole(200, self.script.pages[path])
        if path == "/v1/models":
            return _whole(200, {"data": [{"id": "scripted"}]})
        if path == "/log":
            return _whole(200, self.log)
        if path == "/metrics" and self.script.metrics is not None:
            text = self.script.metrics(len(self.asked)).encode()
            length = b"Content-Length: %d\r\n" % len(text)
            return _HEAD % (200, b"text/plain", length) + text
        return _whole(404, {"error": {"message": "no such page"}})

    async def _answer(
        self, body: dict[str, Any], path: str, arrived: float, writer: asyncio.StreamWriter
    ) -> bool:
        """Whether the connection can be used again."""
        self.asked.append(body)
        script, is_chat = self.script, path.endswith("chat/completions")
        if is_chat and script.refuses_chat:
            writer.write(_whole(400, {"error": {"message": script.refuses_chat}}))
            return True
        for name in script.refuses:
            if name in body or name in body.get("stream_options", {}):
                message = f"unknown field {name}"
                writer.write(_whole(400, {"error": {"message": message}}))
                return True
        prompt = body["messages"][-1]["content"] if is_chat else str(body["prompt"])
        failure = script.fails(prompt)
        if failure in ("429", "500", "400"):
            more = b"Retry-After: 0.05\r\n" if failure == "429" else b""
            writer.write(_whole(int(failure), {"error": {"message": f"as {failure}"}}, more))
            return True
        if failure == "drop":
            writer.transport.abort()
            return False
        writer.write(_HEAD % (200, b"text/event-stream", _STREAM))
        if is_chat:
            writer.write(_event({"choices": [_choice(True, "", role="assistant")]}))
        if failure == "empty":
            writer.write(self._ending(is_chat, 0) + _LAST)
            return True
        sizes = script.chunk_sizes(body["max_tokens"])
        written: list[tuple[int, float]] = []
        self.log[prompt] = (arrived, written)
        for number, (size, total) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
            due = arrived + script.first_seconds + number * script.gap_seconds
            if due > time.perf_counter():
                await asyncio.sleep(due - time.perf_counter())
            if failure is not None and number == 2:
                return await _break(failure, writer)
            payload = self._payload(is_chat, size, total)
            written.append((size, time.perf_counter()))
            writer.write(payload)
        writer.write(self._ending(is_chat, sum(sizes)) + _LAST)
        return True

    def _payload(self, is_chat: bool, size: int, total: int) -> bytes:
        if self.script.says == "usage":
            return self._chunk(is_chat, size, {"usage": self._usage(total)})
        if (is_chat, size) not in self._payloads:
            self._payloads[is_chat, size] = self._chunk(is_chat, size, {})
        return self._payloads[is_chat, size]

    def _chunk(self, is_chat: bool, size: int, more: dict[str, Any]) -> bytes:
        choice = _choice(is_chat, self.script.word * size)
        if self.script.says == "token_ids":
            choice["token_ids"] = [5] * size
        if self.script.says == "origins":
            choice["headstart"] = {"origins": ["accepted"] * size}
        return _event({"id": "x", "object": "chunk", "choices": [choice], **more})

    def _ending(self, is_chat: bool, total: int) -> bytes:
        last = {**_choice(is_chat, ""), "finish_reason": "length"}
        ending = _event({"choices": [last]})
        if self.script.says != "nothing":
            usage = {"usage": self._usage(total)}
            ending += _event({"choices": [], **usage, **self.script.extra})
        return ending + _framed(b"data: [DONE]\n\n")

    def _usage(self, total: int) -> dict[str, Any]:
        script = self.script
        return {
            "prompt_tokens": script.prompt_tokens,
            "completion_tokens": total,
            "prompt_tokens_details": {"cached_tokens": script.cached_tokens},
        }


def _choice(is_chat: bool, text: str, **delta: str) -> dict[str, Any]:
    said = {"delta": {"content": text, **delta}} if is_chat else {"text": text}
    return {"index": 0, **said, "finish_reason": None}


def _event(document: dict[str, Any]) -> bytes:
    return _framed(b"data: " + json.dumps(document).encode() + b"\n\n")


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _whole(status: int, document: dict[str, Any], more: bytes = b"") -> bytes:
    data = json.dumps(document).encode()
    length = b"Content-Length: %d\r\n" % len(data)
    return _HEAD % (status, b"application/json", length + more) + data


async def _break(failure: str, writer: asyncio.StreamWriter) -> bool:
    """End a stream in the middle, in one of the ways that servers have."""
    if failure == "hang":
        await asyncio.sleep(60)
    if failure == "malformed":
        writer.write(_framed(b'data: {"choices": [{"ind\n\n') + _LAST)
    elif failure == "no choices":
        writer.write(_event({"id": "x"}) + _LAST)
    elif failure == "error":
        writer.write(_event({"error": {"message": "the engine failed"}}) + _LAST)
    elif failure == "end":  # in order, but too early
        writer.write(_LAST)
    else:  # cut: without the end that HTTP promises
        await writer.drain()
        writer.transport.abort()
        return False
    return True


async def _serve(server: BenchServer, is_up: Callable[[], None], until: asyncio.Event) -> None:
    listening = await asyncio.start_server(server.connection, "127.0.0.1", 0, backlog=1024)
    server.port = listening.sockets[0].getsockname()[1]
    is_up()
    await until.wait()
    listening.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@contextmanager
def serving(script: Script) -> Iterator[BenchServer]:
    """In a thread of this process."""
    server, is_up, loops = BenchServer(script), threading.Event(), list[Any]()

    async def main() -> None:
        loops.extend([asyncio.get_running_loop(), asyncio.Event()])
        await _serve(server, is_up.set, loops[1])

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert is_up.wait(10)
    try:
        yield server
    finally:
        loops[0].call_soon_threadsafe(loops[1].set)
        thread.join()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    given["tokens_per_chunk"] = tuple(given["tokens_per_chunk"])
    scripted = BenchServer(Script(**given))
    asyncio.run(_serve(scripted, lambda: print(scripted.port, flush=True), asyncio.Event()))
