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


def make_private(folder: Path) -> bool:
    """Make a folder that no other user can write, read or replace; False where it cannot be made.

    For files that are run when they are read. ConfigError where something lies there already that
    another user owns or may open.
    """
    try:
        _make_for_user(folder)
        found = folder.lstat()
    except OSError:
        return False
    if not stat.S_ISDIR(found.st_mode):
        what = "is a link" if stat.S_ISLNK(found.st_mode) else "is a file"
    elif found.st_uid != os.geteuid():
        what = f"belongs to user {found.st_uid}, not to {os.geteuid()}, as this process does"
    elif stat.S_IMODE(found.st_mode) & 0o077:
        what = f"has mode {stat.S_IMODE(found.st_mode):04o}, not 0700"
    else:
        return os.access(folder, os.W_OK)
    raise ConfigError(
        f"{folder} {what}: others could put code there, and it would be run. Remove it, or choose "
        "another folder with HEADSTART_CACHE (or NUMBA_CACHE_DIR, TRITON_CACHE_DIR, where set)."
    )


def _make_for_user(folder: Path) -> None:
    """Like mkdir -p -m 700, whatever the umask; mkdir's own mode is only the last folder's."""
    for parent in reversed(folder.parents):
        if not parent.exists():
            parent.mkdir(mode=0o700, exist_ok=True)
    if not os.path.lexists(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
