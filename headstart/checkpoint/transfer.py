"""Moves bytes from files and memory into new files, and flushes them while more are written.

Inside the kernel where the system allows it: shared blocks, then range copies, then read and
write through one small buffer. No more than that is ever held in memory.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Literal

from headstart.checkpoint.source import Buffer, FileSlice

Copying = Literal["copy", "link"]
Report = Callable[[int], None]
_FLUSH_BYTES = 128 << 20
_RANGE_BYTES = 32 << 20
_BUFFER_BYTES = 1 << 20  # stays in a core's cache between read and write
_FICLONE = 0x40049409
_NO_RANGE_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}
_MODE = 0o666  # less what the user's umask takes away


class Flusher:
    """Counts written bytes and flushes them in the background, so the end need not wait long.

    Leaving the context waits for all flushes and raises what any of them met; after a failure
    there is nothing worth flushing, and files are only closed.
    """

    def __init__(self, report: Report):
        self._report = report
        self._pool = ThreadPoolExecutor(1)
        self._flushes: list[Future[None]] = []
        self._open: set[int] = set()
        self._unflushed = 0

    def __enter__(self) -> Flusher:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)
        for handle in self._open:
            os.close(handle)
        if kind is None:
            for flush in self._flushes:
                flush.result()

    def create(self, path: Path) -> int:
        """A new file, closed by `finish` or at the end."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
        self._open.add(handle)
        return handle

    def advance(self, target: int, num_bytes: int) -> None:
        self._report(num_bytes)
        self._unflushed += num_bytes
        if self._unflushed >= _FLUSH_BYTES:
            self._unflushed = 0
            self._flushes.append(self._pool.submit(os.fdatasync, target))

    def finish(self, target: int) -> None:
        self._flushes.append(self._pool.submit(self._sync_and_close, target))

    def _sync_and_close(self, handle: int) -> None:
        os.fsync(handle)
        self._open.discard(handle)
        os.close(handle)


class Handles:
    """Source files, each opened once, and a buffer to copy through."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    @cached_property
    def buffer(self) -> memoryview:
        """Made when it is needed: where the system copies by itself it is not."""
        return memoryview(bytearray(_BUFFER_BYTES))

    def __enter__(self) -> Handles:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._open.values():
            os.close(handle)

    def of(self, file: Path) -> int:
        if file not in self._open:
            self._open[file] = os.open(file, os.O_RDONLY)
        return self._open[file]


def write_all(target: int, data: Buffer) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(target, view) :]


def copy_range(handles: Handles, piece: FileSlice, target: int, flusher: Flusher) -> None:
    """Append `piece` to `target`; by read and write where the kernel cannot copy ranges."""
    source, start = handles.of(piece.file), piece.start
    in_kernel = True
    while start < piece.end:
        done = 0
        if in_kernel:
            step = min(piece.end - start, _RANGE_BYTES)
            try:
                done = os.copy_file_range(source, target, step, offset_src=start)
            except OSError as error:
                if error.errno not in _NO_RANGE_COPY:
                    raise
                in_kernel = False
        if done == 0:
            part = handles.buffer[: piece.end - start]
            done = os.preadv(source, [part], start)
            if done == 0:
                raise piece.cut_off()
            write_all(target, part[:done])
        start += done
        flusher.advance(target, done)


def copy_file(source: Path, target: Path, copying: Copying, flusher: Flusher) -> None:
    real = Path(os.path.realpath(source))  # hub caches hold links; a result holds files
    # Shards only: people edit the small files of a result, and a link would change the source.
    if copying == "link" and real.stat().st_size and target.suffix == ".safetensors":
        try:
            os.link(real, target)
            return
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
    with Handles() as handles:
        handle = flusher.create(target)
        if not _cloned(handles.of(real), handle):
            copy_range(handles, FileSlice(real, 0, real.stat().st_size), handle, flusher)
    flusher.finish(handle)


def _cloned(source: int, target: int) -> bool:
    """Whether the file system shared the blocks instead of copying them."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def shares_blocks(source: Path, folder: Path, copying: Copying) -> bool:
    if copying == "link" and source.stat().st_dev == folder.stat().st_dev:
        return True
    probe = folder / ".probe"
    try:
        with open(source, "rb") as origin, open(probe, "wb") as handle:
            return _cloned(origin.fileno(), handle.fileno())
    finally:
        probe.unlink(missing_ok=True)
