"""A result folder that appears whole or not at all.

The folder is built beside its target under a hidden name and renamed at the end. The builder
holds a lock on it, so a later run can tell an abandoned one (killed, power cut) from one in
progress, and clears the abandoned ones away. An existing target is only ever replaced as a
whole.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headstart.checkpoint.provenance import PROVENANCE_NAME
from headstart.errors import CheckpointError, WriteFailed

_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_AT_FDCWD = -100


def check_target(out: Path, *, overwrite: bool, inputs: tuple[Path, ...] = ()) -> None:
    """Refuse a target that exists, or that is, contains or lies in one of the inputs."""
    resolved = out.resolve()
    for source in inputs:
        other = source.resolve()
        if resolved == other or resolved in other.parents or other in resolved.parents:
            raise CheckpointError(
                f"--out {out} overlaps the input {source}; results never go into their source. "
                "Choose another folder."
            )
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise CheckpointError(f"{out} exists. Choose another folder, or add --overwrite.")
    is_ours = (out / PROVENANCE_NAME).is_file() or (out.is_dir() and not any(out.iterdir()))
    if out.is_symlink() or not is_ours:
        raise CheckpointError(
            f"{out} was not written by Headstart (no {PROVENANCE_NAME} in it), so --overwrite "
            "does not replace it. Remove it yourself, or choose another folder."
        )


@contextmanager
def building(out: Path) -> Iterator[Path]:
    """Yield an empty sibling folder; on success it becomes `out`, on any failure it is removed."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _clear_abandoned(out)
        partial, lock = _locked_sibling(out)
    except OSError as error:
        raise write_failed(out, error) from error
    try:
        yield partial
        _sync_folder(partial)
        _install(partial, out)
        _sync_folder(out.parent)
    except OSError as error:
        raise write_failed(out, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def write_failed(out: Path, error: OSError) -> WriteFailed:
    """One line for what the system said while writing below or beside `out`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        parent = next(p for p in (out, *out.parents) if p.exists())
        free = shutil.disk_usage(parent).free
        return WriteFailed(
            f"no space left on the disk of {out} ({free / 1e9:.1f} GB free); nothing was kept. "
            "Free some space or choose another --out."
        )
    return WriteFailed(f"cannot write {out}: {error.strerror or error}. Nothing was kept.")


def _locked_sibling(out: Path) -> tuple[Path, int]:
    while True:
        partial = out.parent / f".{out.name}.partial-{secrets.token_hex(4)}"
        partial.mkdir()
        lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if partial.exists():  # else another run took the still unlocked folder for an abandoned one
            return partial, lock
        os.close(lock)


def _clear_abandoned(out: Path) -> None:
    for stale in out.parent.glob(f".{_escaped(out.name)}.partial-*"):
        lock = os.open(stale, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another run is writing {out} right now ({stale.name}). Wait for it to end."
            ) from None
        else:
            shutil.rmtree(stale)
        finally:
            os.close(lock)


def _escaped(name: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def _install(partial: Path, out: Path) -> None:
    if not out.exists():
        os.rename(partial, out)
        return
    # One atomic step, so that a kill leaves either the old folder or the new one in place. What
    # was replaced now carries the partial name and is removed with it.
    libc = ctypes.CDLL(None, use_errno=True)
    names = (os.fsencode(partial), os.fsencode(out))
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code))
        shutil.rmtree(out)
        os.rename(partial, out)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
