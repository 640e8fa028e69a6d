"""The releases of vLLM that the plugin was written for, and what it says to others."""

from __future__ import annotations

from headstart.errors import ConfigError
from headstart.families.versions import is_at_least

OLDEST = "0.26.0"  # the classes' methods have had the same form since
NEWEST_RUN = "0.32.0"  # the newest release that was read and run
TOO_NEW = "0.33.0"


def why_not(version: str) -> str:
    """Why the plugin stays out of this vLLM, in words; empty: it does not."""
    known = f"{OLDEST} up to, but without, {TOO_NEW}"
    try:
        is_old, is_new = not is_at_least(version, OLDEST), is_at_least(version, TOO_NEW)
    except ConfigError:
        return f"vLLM calls its version {version!r}, which is no release's; expected {known}"
    if is_old or is_new:
        return f"found vLLM {version}, which is too {'old' if is_old else 'new'}; expected {known}"
    return ""
