"""Engine versions: parsing, comparing, and the newest releases this package knows the flags of."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from headstart.errors import ConfigError, LaunchError
from headstart.families.engines import ENGINE_TITLES

# A build of the development branch is newer than any release.
MAIN = "main"

# engine -> the newest release whose flags were read; assumed when none is installed
NEWEST = {
    "vllm": "0.32.0", "sglang": "0.5.18", "trtllm": "1.4.0rc1", "xllm": "0.10.0",
    "llamacpp": "b10586",
}  # fmt: skip

# engine -> the oldest release we write commands for, and why
OLDEST = {
    "vllm": ("0.9.0", "before it MTP runs on the removed V0 engine"),
    "sglang": ("0.4.7", "before it the draft path has to be a separate NextN export"),
    "trtllm": ("1.0.0", "before it the PyTorch backend is experimental"),
    "xllm": ("0.6.0", "it is the first release with MTP"),
    "llamacpp": ("b9180", "it is the first build that drafts with a head"),
}


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


class TooOld(LaunchError):
    """A version lacks what was asked; the caller knows whether that version was found at all."""

    def __init__(self, engine: str, version: str, needed: str, what: str, instead: str):
        self._needs = f"{what} needs {ENGINE_TITLES[engine]} {needed} or later"
        self._version, self._instead = version, instead
        super().__init__(f"{self._needs}, found {version}. {instead}")

    def assumed(self) -> LaunchError:
        """The same where no version was found and the newest release we know stands in for it."""
        return LaunchError(
            f"{self._needs}; {self._version} is the newest version known here, not an installed "
            f"one. Name yours with --engine-version. {self._instead}"
        )


def require(engine: str, version: str, needed: str, what: str, instead: str) -> None:
    """LaunchError unless `version` of the engine has `what`."""
    if not is_at_least(version, needed):
        raise TooOld(engine, version, needed, what, instead)


def require_oldest(engine: str, version: str) -> None:
    oldest, why = OLDEST[engine]
    if not is_at_least(version, oldest):
        raise LaunchError(
            f"found {ENGINE_TITLES[engine]} {version}; commands are written for {oldest} and later "
            f"({why}). Upgrade, or name the version of a source build with --engine-version."
        )
