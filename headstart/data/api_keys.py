"""Keys of servers from the environment: the ones a server takes, the one a client sends."""

from __future__ import annotations

import os
from pathlib import Path

from headstart.errors import ConfigError
from headstart.files import read_text, why_unreadable

API_KEY_VARIABLE = "HEADSTART_API_KEY"
PUSH_KEY_VARIABLE = "HEADSTART_PUSH_KEY"
_MOST_BYTES = 1 << 12


def keys_from_environment() -> tuple[str, ...]:
    """All that the variable holds, separated by commas, without the blanks around them."""
    found = os.environ.get(API_KEY_VARIABLE, "").split(",")
    return tuple(key.strip() for key in found if key.strip())


def key_from_environment() -> str | None:
    """The first, if there is one: a server takes them all."""
    return next(iter(keys_from_environment()), None)


def push_key(file: Path | None, flag: str) -> str | None:
    """The key by which a server takes another head: from a file, else from the environment."""
    if file is None:
        return os.environ.get(PUSH_KEY_VARIABLE, "").strip() or None
    try:
        key = read_text(file, _MOST_BYTES).strip()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{flag} is {str(file)!r}, which cannot be read ({why_unreadable(error)}). Give a "
            "file with the push key."
        ) from None
    if not key or "\n" in key:
        raise ConfigError(
            f"{flag} is {str(file)!r}, which holds {'several lines' if key else 'nothing'}; give a "
            "file with one line, the push key."
        )
    return key
