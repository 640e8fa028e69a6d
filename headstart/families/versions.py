"""Versions of other engines: parsing and comparing."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from headstart.errors import ConfigError

# A build of the development branch is newer than any release.
MAIN = "main"


def parse(text: str) -> Version:
    """`v0.11.0`, `0.11.0rc1+cu128`, `b10586` or `main` as something that can be compared."""
    if text == MAIN:
        return Version("999999")
    try:
        return Version(text[1:] if text[:1] == "b" and text[1:].isdigit() else text)
    except InvalidVersion:
        raise ConfigError(
            f"{text!r} is not a version; expected something like 0.27.1, or {MAIN} for a build of "
            "the development branch."
        ) from None


def is_at_least(version: str, needed: str) -> bool:
    return parse(version) >= parse(needed)
