"""Keys of servers from the environment: the ones a server takes, the one a client sends."""

from __future__ import annotations

import os

API_KEY_VARIABLE = "HEADSTART_API_KEY"


def keys_from_environment() -> tuple[str, ...]:
    """All that the variable holds, separated by commas, without the blanks around them."""
    found = os.environ.get(API_KEY_VARIABLE, "").split(",")
    return tuple(key.strip() for key in found if key.strip())


def key_from_environment() -> str | None:
    """The first, if there is one: a server takes them all."""
    return next(iter(keys_from_environment()), None)
