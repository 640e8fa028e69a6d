"""Where what can be made again is kept for the user."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """HEADSTART_CACHE, else a folder where the system keeps such things."""
    own = os.environ.get("HEADSTART_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headstart"
