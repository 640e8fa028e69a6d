"""Reports made by hand: what `inspect` would say about well-known models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headstart.families.registry import family
from headstart.heads.inspection import HeadReport, Report, TrunkReport
from headstart.launch import EngineCommand, LaunchOptions, build
from headstart.launch.versions import NEWEST

MODEL = Path("/models/a model")  # the space checks quoting everywhere


def report(
    name: str = "deepseek_v3",
    *,
    state: str = "complete",
    modules: int = 1,
    path: Path = MODEL,
    model_type: str | None = None,
    config: dict[str, Any] | None = None,
    architectures: tuple[str, ...] = (),
    format: str | None = None,
) -> Report:
    owner = family(name) if name else None
    is_there = state in ("complete", "undeclared")
    missing = () if is_there or state == "absent" else ("model.layers.61.eh_proj.weight",)
    return Report(
        path,
        owner,
        model_type if model_type is not None else name,
        architectures,
        TrunkReport(61, 7168, 129280, 1000, 10**12, "BF16", "", False),
        HeadReport(
            state,
            modules if state != "undeclared" else None,
            modules if is_there else 0,
            20 if is_there else 0,
            missing,
            3 * 2**30 if is_there else 0,
            "BF16",
            {},
            1152,
            "",
        ),
        {},
        (),
        config or {},
        format=format,
    )


def command(engine: str, name: str = "", version: str = "", **options: Any) -> EngineCommand:
    """The command for a healthy checkpoint of a family; options of the report start with r_."""
    formats = {"llamacpp": "gguf", "mlx": "mlx"}
    if engine in formats:
        options.setdefault("r_format", formats[engine])
    name = name or ("qwen3_5" if engine in formats else "deepseek_v3")
    own = {key[2:]: options.pop(key) for key in list(options) if key.startswith("r_")}
    return build(engine, report(name, **own), LaunchOptions(**options), version or NEWEST[engine])


def value_of(built: EngineCommand, flag: str) -> str:
    """What follows a flag."""
    return built.argv[built.argv.index(flag) + 1]


def everything(built: EngineCommand) -> str:
    """All that the user gets to run."""
    return built.shell() + repr([(p.argv, p.log) for p in built.processes])
