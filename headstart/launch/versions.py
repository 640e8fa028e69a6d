"""The releases of engines that commands are written for, and what older ones lack."""

from __future__ import annotations

from headstart.errors import LaunchError
from headstart.families.engines import ENGINE_TITLES
from headstart.families.versions import MAIN, is_at_least

# engine -> the newest release whose flags were read; assumed when none is installed
NEWEST = {
    "vllm": "0.33.0", "sglang": "0.5.23", "trtllm": "1.4.0rc1", "xllm": "0.10.1",
    "llamacpp": "b10586", "mlx": "0.7.10",
}  # fmt: skip

# engine -> the oldest release we write commands for, and why
OLDEST = {
    "vllm": ("0.9.0", "before it MTP runs on the removed V0 engine"),
    "sglang": ("0.4.7", "before it the draft path has to be a separate NextN export"),
    "trtllm": ("1.0.0", "before it the PyTorch backend is experimental"),
    "xllm": ("0.6.0", "it is the first release with MTP"),
    "llamacpp": ("b9180", "it is the first build that drafts with a head"),
    "mlx": ("0.6.15", "it is the first release whose flags were read"),
}


class TooOld(LaunchError):
    """A version lacks what was asked; the caller knows whether that version was found at all."""

    def __init__(self, engine: str, version: str, needed: str, what: str, instead: str):
        title = ENGINE_TITLES[engine]
        self._needs = f"{what} needs {title} {needed} or later"
        if needed == MAIN:
            self._needs = f"{what} needs a build of {title}'s development branch"
        self._is_main, self._version, self._instead = needed == MAIN, version, instead
        super().__init__(f"{self._needs}, found {version}. {instead}")

    def assumed(self) -> LaunchError:
        """The same where no version was found and the newest release we know stands in for it."""
        if self._is_main:
            return LaunchError(
                f"{self._needs}: no release has it, up to {self._version}. With such a build: "
                f"`headstart launch` with --engine-version {MAIN}. {self._instead}"
            )
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
