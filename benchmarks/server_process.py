"""What the programs that measure the server share: its process, and a client that costs little."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

DONE = b"data: [DONE]"


class ServerProcess:
    """A server in a process of its own, and what /proc says about it."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process, self.lines = process, list[str]()
        self.port = self._wait_ready()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _wait_ready(self) -> int:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if found := re.search(r"ready at http://[^:]+:(\d+)", line):
                return int(found[1])
        raise SystemExit("the server did not start:\n" + "\n".join(self.lines))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def close(self) -> None:
        """Read what an ended process has said to its end."""
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()

    @property
    def resident_mb(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    @property
    def processor_seconds(self) -> float:
        """Of all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def loop_seconds(self) -> tuple[float, float]:
        """Of the first thread, which runs the event loop: on a processor, and waiting for one."""
        pid = self.process.pid
        ran, waited, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
        return int(ran) / 1e9, int(waited) / 1e9

    @property
    def waited_seconds(self) -> dict[str, float]:
        """Of each thread, waiting for a processor; one with the interpreter lock keeps it then."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return {
            task.name: waited for task in list(tasks) if (waited := waited_by(task)) is not None
        }


def waited_by(task: Path) -> float | None:
    """Seconds that a thread waited for a processor; None if it has ended."""
    try:
        return int((task / "schedstat").read_text().split()[1]) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return None


@contextmanager
def serving(
    model: Path, *flags: str, script: Sequence[str] = ("-m", "headstart")
) -> Iterator[ServerProcess]:
    command = [sys.executable, *script, "serve", str(model), "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    server = None
    try:
        server = ServerProcess(process)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        if server is not None:
            server.close()


class Answer:
    """A response: its status, and its body as it comes."""

    def __init__(self, reader: asyncio.StreamReader, status: int, num_bytes: int | None):
        self._reader, self.status, self._num_bytes = reader, status, num_bytes

    async def parts(self) -> AsyncIterator[bytes]:
        """Pieces as the server wrote them; ConnectionError where the end is missing."""
        try:
            if self._num_bytes is not None:
                yield await self._reader.readexactly(self._num_bytes)
                return
            while size := int(await self._reader.readline() or b"-", 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
        except (asyncio.IncompleteReadError, ValueError) as error:
            raise ConnectionError("the answer ends before its end") from error


@asynccontextmanager
async def asked(
    port: int, fields: dict[str, Any] | None, path: str = "/v1/completions"
) -> AsyncIterator[Answer]:
    """POST (GET without fields) on a connection of its own, which is cut when this is left."""
    body = b"" if fields is None else json.dumps(fields).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        method = "GET" if fields is None else "POST"
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        status, *headers = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        lengths = [h for h in headers if h.lower().startswith("content-length:")]
        size = int(lengths[0].split(":")[1]) if lengths else None
        yield Answer(reader, int(status.split()[1]), size)
    finally:
        writer.transport.abort()


async def get(port: int, path: str) -> bytes:
    async with asked(port, None, path) as answer:
        return b"".join([part async for part in answer.parts()])
