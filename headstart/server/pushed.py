"""A head that is sent to a running server: taken within limits, checked, swapped between rounds.

Whoever has the push key may do this, where the server was started with --allow-push. What arrives
goes to a folder of its own, in which both files have names of ours, is opened as `--head` opens a
head, and is removed again, whatever happens.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fastapi import Depends, FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from headstart.backends.base import PreparedHead
from headstart.checkpoint.reader import Checkpoint
from headstart.engine.engine import Engine
from headstart.errors import HeadstartError
from headstart.heads.formats import format_of
from headstart.push.sent_head import CONTENT_TYPE, LENGTH_BYTES, MOST_CONFIG_BYTES, digest_of
from headstart.push.servers import PATH
from headstart.server.access import Access
from headstart.server.operation import document_response
from headstart.server.refusals import Refusal, unavailable
from headstart.server.state import ServerState

_log = logging.getLogger("headstart.server")
_PREFIX = "headstart-push-"
_SPARE_BYTES = 64 << 20  # of the disk, that a head must leave free
_CODE = "head_refused"


def add_push(app: FastAPI, state: ServerState) -> None:
    """The route; without --allow-push it says so."""
    options, lock = state.options, asyncio.Lock()
    if not options.allow_push:

        @app.post(PATH, include_in_schema=False)
        async def refuse() -> Response:
            raise Refusal(
                403, "this server was started without --allow-push and keeps its head. Restart it "
                "with the head, or with --allow-push.", code="push_not_allowed",
            )  # fmt: skip

        return
    clear_abandoned()
    key = options.push_key
    assert key is not None  # checked with the options
    access = Access(options, is_public=state.is_public, keys=(key,))

    @app.post(PATH, include_in_schema=False, dependencies=[Depends(access.check)])
    async def push_head(request: Request) -> Response:
        """Swap the head that the body holds into the engine; requests go on."""
        state.gate.check()
        if lock.locked():
            raise unavailable("another head is being pushed.", code="push_under_way")
        async with lock:
            return document_response(await _take(request, state))


async def _take(request: Request, state: ServerState) -> dict[str, int | str]:
    _check_header(request, state.options.max_push_bytes)
    with _folder() as folder:
        try:
            async with asyncio.timeout(state.options.request_timeout_seconds):
                digest = await _receive(request, folder, state.options.max_push_bytes)
        except TimeoutError:
            raise Refusal(408, "the head did not arrive in time.", code="body_timeout") from None
        except ClientDisconnect:
            raise Refusal(400, "the client went away while sending.", code="client_gone") from None
        try:
            # In no pool of the server's: prompts that wait for a thread must not wait for this.
            prepared = await asyncio.to_thread(_opened, state.model.engine, folder)
            await state.worker.call(lambda engine: engine.swap_head(prepared))
        except HeadstartError as error:
            said = str(error).replace(str(folder), "the pushed head")
            raise Refusal(400, said, code=_CODE) from None
    version = state.model.engine.head_version
    _log.info("another head drafts from now on: version %d, %s", version, digest)
    return {"head_version": version, "digest": digest}


def _check_header(request: Request, most: int) -> None:
    kind = request.headers.get("content-type", "")
    if kind != CONTENT_TYPE:
        raise Refusal(
            415, f"the content type is {kind[:80]!r}; send {CONTENT_TYPE}, as `headstart push` "
            "does.", code="bad_content_type",
        )  # fmt: skip
    declared = request.headers.get("content-length", "")
    if not declared.isdigit() or len(declared) > 18:
        raise Refusal(400, "there is no Content-Length. Say how many bytes come.", code=_CODE)
    if int(declared) > most:
        raise _too_large(most)
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if int(declared) + _SPARE_BYTES > free:
        raise unavailable("there is no room on the server's disk for this head.", code="disk_full")


def _too_large(most: int) -> Refusal:
    return Refusal(
        413, f"the head has more than {most:,} bytes, this server's limit (--max-push-bytes).",
        code="body_too_large",
    )  # fmt: skip


async def _receive(request: Request, folder: Path, most: int) -> str:
    """Write config.json and the tensors; the digest of all that came."""
    state, stream = hashlib.sha256(), _Parts(request.stream())
    size = int.from_bytes(await stream.read(LENGTH_BYTES), "little")
    if not 0 < size <= MOST_CONFIG_BYTES:
        raise Refusal(
            400, f"the body says that its config has {size:,} bytes; expected up to "
            f"{MOST_CONFIG_BYTES:,}. Send it with `headstart push`.", code=_CODE,
        )  # fmt: skip
    config = await stream.read(size)
    state.update(size.to_bytes(LENGTH_BYTES, "little") + config)
    (folder / "config.json").write_bytes(config)
    count = LENGTH_BYTES + size
    with open(folder / "head.safetensors", "xb") as file:
        async for part in stream.rest():
            count += len(part)
            if count > most:
                raise _too_large(most)
            state.update(part)
            await asyncio.to_thread(_write, file, part)
    return digest_of(state)


def _write(file: BinaryIO, part: bytes) -> None:
    try:
        file.write(part)
    except OSError as error:
        raise unavailable(
            f"the server could not keep the head ({error.strerror}).", code="disk_full"
        ) from error


class _Parts:
    """A stream of bytes of which the first ones are asked for by number."""

    def __init__(self, chunks: AsyncIterator[bytes]):
        self._chunks, self._held = chunks, b""

    async def read(self, count: int) -> bytes:
        while len(self._held) < count:
            chunk = await anext(self._chunks, None)
            if chunk is None:
                raise Refusal(400, "the body ends within its config. Push again.", code=_CODE)
            self._held += chunk
        found, self._held = self._held[:count], self._held[count:]
        return found

    async def rest(self) -> AsyncIterator[bytes]:
        yield self._held
        async for chunk in self._chunks:
            yield chunk


def _opened(engine: Engine, folder: Path) -> PreparedHead:
    if format_of(Checkpoint.open(folder)) != "headstart":
        raise Refusal(
            400, "the config is not that of a head in our own format. Send it with `headstart "
            "push`.", code=_CODE,
        )  # fmt: skip
    return engine.prepare_head(folder)


@contextmanager
def _folder() -> Iterator[Path]:
    """For one head; a lock says that it is in use."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def clear_abandoned() -> None:
    """Remove what servers that were killed left behind."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # another user's, or nothing of ours
            continue
        try:
            if os.fstat(handle).st_uid == os.getuid():
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # another server takes a head just now
        finally:
            os.close(handle)
