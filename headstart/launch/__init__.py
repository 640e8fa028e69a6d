"""Launching engines: one neutral set of options, one adapter per engine and its versions.

`ENGINES` is the registry; adapters are imported when used. An adapter has `build(report, options,
version) -> EngineCommand`.
"""

from __future__ import annotations

from importlib import import_module

from headstart.errors import ConfigError, HeadstartError
from headstart.families.engines import ENGINE_TITLES
from headstart.heads.inspection import Report
from headstart.launch.command import EngineCommand
from headstart.launch.options import LaunchOptions
from headstart.launch.versions import NEWEST, TooOld

# name -> module
ENGINES = {name: f"headstart.launch.{name}" for name in ENGINE_TITLES}

__all__ = ["ENGINES", "EngineCommand", "LaunchOptions", "build", "commands_for"]


def build(
    engine: str, report: Report, options: LaunchOptions, version: str, *, is_assumed: bool = False
) -> EngineCommand:
    """The command for an engine; LaunchError if it cannot do what was asked.

    `is_assumed`: the version is the newest known, not one that was found or named.
    """
    if engine not in ENGINES:
        raise ConfigError(f"no engine is called {engine!r}; expected one of {', '.join(ENGINES)}.")
    adapter = import_module(ENGINES[engine])
    try:
        result = adapter.build(report, options, version.removeprefix("v"))
    except TooOld as error:
        raise (error.assumed() if is_assumed else error) from None
    assert isinstance(result, EngineCommand)
    return result


def commands_for(report: Report) -> dict[str, EngineCommand | str]:
    """For every engine the default command, or the reason why there is none."""
    result: dict[str, EngineCommand | str] = {}
    for engine in ENGINES:
        try:
            newest = NEWEST[engine]
            result[engine] = build(engine, report, LaunchOptions(), newest, is_assumed=True)
        except HeadstartError as error:
            result[engine] = str(error)
    return result
