"""What a server decided when it started, for its log: model, head, memory, and how K is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import headstart
from headstart.engine.auto.costs import MENU

if TYPE_CHECKING:
    from headstart.engine.engine import Engine

_BATCHES = (1, 4, 16, 64)  # shown in the table of costs


def startup_lines(engine: Engine, model_name: str) -> list[str]:
    """One fact a line; the last ones say how many tokens are drafted."""
    built = engine.built
    kind, longest = built.checkpoint.config.model_type, engine.admission.longest
    limit = " (as much as K/V memory holds)" if longest < built.max_len else ""
    return [
        f"headstart {headstart.__version__} serves {model_name}: {kind}, {built.dtype} on "
        f"{built.device}, prompt and answer up to {longest} tokens{limit}",
        _head_line(engine),
        *engine.notes,
        f"up to {engine.options.max_running_requests} answers at once, "
        f"{engine.options.num_rows} rows per trunk pass",
        *_speculation_lines(engine),
    ]


def _head_line(engine: Engine) -> str:
    if engine.built.head is not None:
        return "head: complete and loaded"
    if engine.options.speculate == 0:
        return "head: not loaded, speculate is 0"
    return "head: none"


def _speculation_lines(engine: Engine) -> list[str]:
    speculation, options = engine.speculation, engine.options
    if speculation is None:
        return ["drafts: none"]
    if options.speculate_off_above is not None:
        limit = f", none while more than {options.speculate_off_above} answers run"
    else:
        limit = ""
    if options.speculate != "auto":
        return [f"drafts: {options.speculate} per round unless a request says otherwise{limit}"]
    lines = [f"drafts: auto, 0 to {options.max_drafts} per round{limit}; a round takes (profiled)"]
    for batch in (b for b in _BATCHES if b <= options.max_running_requests):
        costs = [
            f"K={drafts} {1e3 * seconds:.2f} ms"
            for drafts in MENU
            if drafts <= options.max_drafts
            and (seconds := speculation.round_seconds(batch, drafts)) is not None
        ]
        lines.append(f"  {batch:>2} running: " + ", ".join(costs))
    return lines
