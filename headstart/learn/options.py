"""Options of learning while serving: one frozen dataclass that is also command-line flags."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, fields
from pathlib import Path

from headstart.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LearnOptions:
    """What is kept, how much time learning may take, and where it runs; off without `learn`."""

    learn: Path | None = field(
        default=None,
        metadata={"help": "collect prompts and answers in this folder, and tune the head on them"},
    )
    learn_gigabytes: float = field(
        default=1.0, metadata={"help": "most disk space for collected texts and their states"}
    )
    learn_share: float = field(
        default=0.1,
        metadata={"help": "most of the time that learning may run while requests run, 0 to 1"},
    )
    learn_device: str = field(
        default="same", metadata={"help": "where it runs: same (as serving), cpu, cuda, cuda:1"}
    )
    learn_base: Path | None = field(
        default=None,
        metadata={"help": "dataset of the first tuning: mixed in, so that it stays known"},
    )
    learn_options: Path | None = field(
        default=None, metadata={"help": "JSON file of options of `headstart train` to change"}
    )
    learn_not_for: list[str] | None = field(
        default=None,
        metadata={"help": "collect nothing for the API key of this name, may be repeated"},
    )

    def __post_init__(self) -> None:
        if not 0 < self.learn_gigabytes < math.inf:
            raise ConfigError(f"--learn-gigabytes is {self.learn_gigabytes}; give more than 0.")
        if not 0 <= self.learn_share <= 1:
            raise ConfigError(f"--learn-share is {self.learn_share}; give 0 to 1.")
        changed = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        if self.learn is None and changed:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
            raise ConfigError(f"{flags} is given without --learn DIR; give it, too.")

    def check_names(self, keys: tuple[str, ...]) -> None:
        """ConfigError for a name that no key has: what it was to protect would be collected."""
        known = [key_name(key) for key in keys]
        for name in self.learn_not_for or ():
            if name not in known:
                there = f"the keys are {', '.join(known)}" if known else "there are no keys"
                raise ConfigError(f"--learn-not-for is {name!r}; {there}.")


def key_name(key: str) -> str:
    """A name for an API key that may stand in logs and commands: a part of its digest."""
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
