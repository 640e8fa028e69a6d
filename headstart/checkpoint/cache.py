"""Where what can be made again is kept for the user."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from headstart.errors import ConfigError


def cache_folder() -> Path:
    """HEADSTART_CACHE, else a folder where the system keeps such things."""
    own = os.environ.get("HEADSTART_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headstart"


def compiled_folder(variable: str, name: str) -> Path:
    """Where a compiler's results are kept: inside of the folder of its own variable, or of ours."""
    base = Path(os.environ.get(variable) or cache_folder())
    return base if base.name == name else base / name  # processes inherit the variable


def make_private(folder: Path) -> bool:
    """Make a folder that no other user can write, read or replace; False where it cannot be made.

    For files that are run when they are read. ConfigError where something lies there already that
    another user owns or may open.
    """
    try:
        _make_for_user(folder)
        what = why_unsafe(folder)
    except OSError:
        return False
    if what is None:
        return os.access(folder, os.W_OK)
    raise ConfigError(
        f"{folder} {what}: others could put code there, and it would be run. Remove it, or choose "
        "another folder with HEADSTART_CACHE (or NUMBA_CACHE_DIR, TRITON_CACHE_DIR, where set)."
    )


def why_unsafe(folder: Path) -> str | None:
    """Why files in a folder that is there are not to be run; None if only this user wrote them."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "is a link" if stat.S_ISLNK(found.st_mode) else "is a file"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, not to {os.geteuid()}, as this process does"
    if stat.S_IMODE(found.st_mode) & 0o077:
        return f"has mode {stat.S_IMODE(found.st_mode):04o}, not 0700"
    return None


def _make_for_user(folder: Path) -> None:
    """Like mkdir -p -m 700, whatever the umask; mkdir's own mode is only the last folder's."""
    for parent in reversed(folder.parents):
        if not parent.exists():
            parent.mkdir(mode=0o700, exist_ok=True)
    if not os.path.lexists(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
