"""A result folder that appears whole or not at all.

The folder is built beside its target under a hidden name and renamed at the end. The builder
holds a lock on it, so a later run can tell an abandoned one (killed, power cut) from one in
progress, and clears the abandoned ones away. An existing target is only ever replaced as a
whole, and only where that was asked for.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headstart.checkpoint.cache import cache_folder
from headstart.checkpoint.provenance import PROVENANCE_NAME
from headstart.errors import CheckpointError, WriteFailed

_NO_REPLACE, _EXCHANGE = 1, 2  # flags of renameat2(2)
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_AT_FDCWD = -100
_ANOTHER_FOLDER = "Choose another --out, or see that its disk works."
_REMEDIES = {
    errno.EACCES: "Choose an --out that you may write to, or change its permissions.",
    errno.EPERM: "Choose an --out that you may write to, or change its permissions.",
    errno.EROFS: "The disk is mounted read-only: choose an --out on another one.",
    errno.ENOTDIR: "A part of the path is a file: choose another --out.",
    errno.EEXIST: "It appeared meanwhile: choose another --out, or add --overwrite.",
    errno.ENOENT: "A file vanished meanwhile: run again while no other program writes to them.",
    errno.ENAMETOOLONG: "Choose an --out with a shorter name.",
}


def check_target(out: Path, *, overwrite: bool, inputs: tuple[Path, ...] = ()) -> None:
    """Refuse a target that exists, or that is, contains or lies in one of the inputs."""
    check_parents(out)
    resolved = Path(os.path.realpath(out))
    for source in inputs:
        other = Path(os.path.realpath(source))
        if resolved == other or resolved in other.parents or other in resolved.parents:
            raise CheckpointError(
                f"--out {out} overlaps the input {source}; results never go into their source. "
                "Choose another folder."
            )
    if not os.path.lexists(out):
        return
    if out.is_symlink():
        raise CheckpointError(
            f"{out} is a symbolic link; results only replace folders. Give the folder it points "
            "to, or remove the link."
        )
    if not out.is_dir():
        raise CheckpointError(f"{out} is a file; the result is a folder. Choose another name.")
    is_ours = (out / PROVENANCE_NAME).is_file() or not any(out.iterdir())
    if not overwrite:
        more = ", or add --overwrite" if is_ours else ""
        raise CheckpointError(f"{out} exists. Choose another folder{more}.")
    if not is_ours:
        raise CheckpointError(
            f"{out} was not written by Headstart (no {PROVENANCE_NAME} in it), so --overwrite "
            "does not replace it. Remove it yourself, or choose another folder."
        )


def check_parents(out: Path) -> None:
    """Refuse a target that could only be made inside a file."""
    parents = _absolute(out).parents  # none of the root
    above = next((parent for parent in parents if os.path.lexists(parent)), None)
    if above is not None and not above.is_dir():
        raise CheckpointError(f"--out is {out}, and {above} is not a folder: choose another --out.")


@contextmanager
def building(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty sibling folder; on success it becomes `out`, on any failure it is removed."""
    given, out = out, _absolute(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _clear_abandoned(out)
        partial, lock = _locked_sibling(out)
    except OSError as error:
        raise write_failed(given, error) from error
    try:
        yield partial
        for folder, _, _ in os.walk(partial):
            _sync_folder(Path(folder))
        _install(partial, out, overwrite)
        _sync_folder(out.parent)
    except OSError as error:
        raise write_failed(given, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def write_failed(out: Path, error: OSError) -> WriteFailed:
    """One line for what the system said while writing below or beside `out`."""
    option = "--out"
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(cache_folder())):
        option = "HEADSTART_CACHE"  # no command was asked to write there
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        parent = next(p for p in (out, *_absolute(out).parents) if os.path.exists(p))
        free = shutil.disk_usage(parent).free
        return WriteFailed(
            f"no space left on the disk of {out} ({free / 1e9:.1f} GB free); nothing was kept. "
            f"Free some space or choose another {option}."
        )
    where = f" ({error.filename})" if error.filename else ""
    remedy = _REMEDIES.get(error.errno or 0, _ANOTHER_FOLDER)
    if error.errno == errno.ENOENT and not _absolute(out).parent.is_dir():
        remedy = "Its folder is not there and could not be made: choose another --out."
    return WriteFailed(
        f"cannot write {out}: {error.strerror or error}{where}. Nothing was kept. "
        f"{remedy.replace('--out', option)}"
    )


def _absolute(out: Path) -> Path:
    """`out` with a name and a parent of its own, also where it is given as `.` or `x/..`."""
    if out.name in ("", ".."):
        return Path(os.path.realpath(out))
    return Path(os.path.realpath(out.parent)) / out.name


def _locked_sibling(out: Path) -> tuple[Path, int]:
    while True:
        partial = out.parent / f".{out.name}.partial-{secrets.token_hex(4)}"
        partial.mkdir()
        try:
            lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another run took the still unlocked folder for an abandoned one
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if partial.exists():  # else the same, a moment later
            return partial, lock
        os.close(lock)


def _clear_abandoned(out: Path) -> None:
    pattern = re.compile(rf"\.{re.escape(out.name)}\.partial-[0-9a-f]{{8}}")
    for stale in [p for p in out.parent.iterdir() if pattern.fullmatch(p.name)]:
        try:
            lock = os.open(stale, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            continue  # cleared by another run just now, or nothing that we made
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another run is writing {out} right now ({stale.name}). Wait for it to end."
            ) from None
        else:
            shutil.rmtree(stale, ignore_errors=True)  # its run, or another one, may be at it, too
        finally:
            os.close(lock)


def _install(partial: Path, out: Path, overwrite: bool) -> None:
    """One atomic step, so that a kill leaves either the old state or the new one in place."""
    if not overwrite or not os.path.lexists(out):
        try:
            if not _renamed(partial, out, _NO_REPLACE):
                os.rename(partial, out)
            return
        except FileExistsError:
            if not overwrite:
                raise
    check_target(out, overwrite=True)  # again: it may not be what it was before the long copy
    # What was replaced now carries the partial name and is removed with it.
    if _renamed(partial, out, _EXCHANGE):
        return
    # A file system that cannot exchange two names: the window is two renames long.
    aside = out.parent / f".{out.name}.partial-{secrets.token_hex(4)}"
    os.rename(out, aside)
    try:
        os.rename(partial, out)
    except BaseException:
        os.rename(aside, out)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _renamed(old: Path, new: Path, flags: int) -> bool:
    """renameat2(2); False where the system or file system does not have it."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if rename(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(new))


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
