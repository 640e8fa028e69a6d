"""The server's side of process.py: sends messages, waits a limited time for their text.

Most templates take less than a millisecond. One that takes longer than a tenth of a second is given
up at first, and tried again by a caller that has time (`patiently`), so that threads which prepare
requests are free for others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from headstart.data.prompt_reader import refused_by_template
from headstart.errors import EngineError, RequestError
from headstart.server.forks import WAIT_FACTOR, ForkServer
from headstart.server.refusals import stopped
from headstart.server.templates.process import ANSWERED, ASKED, LARGE, MAX_BYTES, TEXT

_QUICK_SECONDS = 0.1  # of a processor
_SLOW_THREADS = 2
_MOST_IDLE = 8  # processes that wait for the next request

Result = TypeVar("Result")


class SlowTemplate(Exception):
    """A template did not end soon; the same call within `patiently` may give it more time."""


class Job(NamedTuple):
    template: str
    values: dict[str, Any]

    def bytes_after(self, template: str) -> bytes:
        """For a process that had this template last: the same is not sent again."""
        given = None if template == self.template else self.template
        return json.dumps({"template": given, **self.values}).encode()


class TemplateProcess:
    """Renders one tokenizer's chat templates in other processes."""

    def __init__(self, tokenizer: Any, *, max_seconds: float):
        self._tokenizer, self._max_seconds = tokenizer, max_seconds
        self.is_closed = False
        self._idle: list[socket.socket] = []
        self._open: dict[socket.socket, str] = {}  # with the template that it had last
        self._thread = threading.local()
        # Templates that take long wait for each other, and nothing else for them.
        self.slow_pool = ThreadPoolExecutor(_SLOW_THREADS, thread_name_prefix="slow")
        self._lock = threading.Lock()
        self._forks: ForkServer | None = None  # until it is needed

    def render(self, messages: Sequence[Mapping[str, Any]], options: dict[str, Any]) -> str:
        """The text of messages; RequestError says why there is none."""
        try:
            template = self._tokenizer.get_chat_template(tools=options.get("tools"))
        except ValueError as error:
            raise refused_by_template(str(error)) from None
        job = Job(template, {"messages": messages, "options": options})
        is_patient = getattr(self._thread, "is_patient", False)
        limit = self._max_seconds if is_patient else min(_QUICK_SECONDS, self._max_seconds)
        answer = self._answer(job, limit, is_patient)
        if answer is not None:
            return _text(*answer)
        if self.is_closed:
            raise stopped()
        if limit < self._max_seconds:
            raise SlowTemplate
        raise RequestError(
            f"the chat template takes more than {self._max_seconds:g} s for these messages "
            "(--max-template-seconds). Change the messages or chat_template_kwargs.",
            field="prompt",
        )

    def patiently(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """The call, whose templates have all the time that the server gives."""
        self._thread.is_patient = True
        try:
            return call(*arguments)
        finally:
            self._thread.is_patient = False

    def close(self) -> None:
        """End all processes; requests that wait for one are refused, and all that follow."""
        self.is_closed = True
        self.slow_pool.shutdown(wait=False)  # what waits there is refused in a moment
        for worker in list(self._open):
            with contextlib.suppress(OSError):  # it ended meanwhile
                worker.shutdown(socket.SHUT_RDWR)
        while self._idle:
            self._idle.pop().close()
        with self._lock:
            if self._forks is not None:
                self._forks.close()

    def _started(self) -> ForkServer:
        with self._lock:
            if self.is_closed:
                raise stopped()
            if self._forks is None:
                names = json.dumps(self._tokenizer.special_tokens_map).encode()
                self._forks = ForkServer(
                    "headstart.server.templates.process", names, "renders chat templates"
                )
            return self._forks

    def _answer(self, job: Job, limit: float, is_patient: bool) -> tuple[bytes, bytes] | None:
        """What a process says, one that waits if there is one; None where a limit ended it."""
        started = time.monotonic()
        with contextlib.suppress(IndexError):
            answer = self._ask(self._idle.pop(), job, limit, is_patient)
            # One that ends within less time than it had was gone before.
            if answer is not None or time.monotonic() - started >= limit:
                return answer
        try:
            worker = self._started().connect()
        except EngineError:
            if self.is_closed:
                return None
            raise
        self._open[worker] = ""
        return None if self.is_closed else self._ask(worker, job, limit, is_patient)

    def _ask(
        self, worker: socket.socket, job: Job, seconds: float, is_patient: bool
    ) -> tuple[bytes, bytes] | None:
        """What a process says; None where it was killed, or too slow."""
        wait = WAIT_FACTOR * seconds
        data = job.bytes_after(self._open[worker])
        is_whole = False
        try:
            worker.settimeout(wait + 1)
            self._open[worker] = job.template
            worker.sendall(ASKED.pack(len(data), seconds, wait, is_patient) + data)
            kind, size = ANSWERED.unpack(_read(worker, ANSWERED.size))
            answer = kind, _read(worker, min(size, MAX_BYTES))
            is_whole = not is_patient and len(self._idle) < _MOST_IDLE
            return answer
        except (OSError, EOFError):
            return None
        finally:
            if is_whole and not self.is_closed:
                self._idle.append(worker)
            else:
                self._open.pop(worker, None)
                worker.close()


async def in_thread(
    pool: Executor, templates: TemplateProcess | None, call: Callable[..., Result], *arguments: Any
) -> Result:
    """The call in a thread of the pool; what a slow template holds up, later in another one."""
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(pool, call, *arguments)
    except SlowTemplate:
        assert templates is not None
        if templates.is_closed:
            raise stopped() from None
        return await loop.run_in_executor(
            templates.slow_pool, templates.patiently, call, *arguments
        )


def _read(stream: socket.socket, size: int) -> bytes:
    parts = []
    while size > 0:
        part = stream.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _text(kind: bytes, data: bytes) -> str:
    text = data.decode("utf-8", "surrogatepass")
    if kind == TEXT:
        return text
    if kind == LARGE:
        raise RequestError(
            f"the chat template writes more than {MAX_BYTES >> 20} MiB for these messages, or "
            "needs too much memory. Send fewer or shorter ones.",
            field="prompt",
        )
    raise refused_by_template(text)
