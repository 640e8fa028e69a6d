"""`headstart demo`: a real model answers without and with its head, side by side."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headstart.cli.options import Json
from headstart.cli.spinning import limit_spinning
from headstart.errors import ConfigError, WriteFailed
from headstart.report.terminal import say

if TYPE_CHECKING:
    from headstart.demo.race import Race

_PAGE = "report.html"


def run(
    *,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where report.html goes.")
    ] = Path("headstart-demo"),
    weights: Annotated[
        Literal["int8", "int4", "as-dtype"],
        typer.Option("--weights", help="int8, int4 (fewer bytes, coarser) or as-dtype (fp32)."),
    ] = "int8",
    gguf: Annotated[
        bool, typer.Option("--gguf", help="Run the package's GGUF file itself, nothing unpacked.")
    ] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Longest answer.")] = 112,
    threads: Annotated[
        int | None, typer.Option("--threads", help="CPU threads; default: measured at start.")
    ] = None,
    json_output: Json = False,
) -> None:
    if max_tokens < 8:
        raise ConfigError(f"--max-tokens is {max_tokens}; give at least 8, or nothing can be seen.")
    _prepare(out)
    limit_spinning()
    from headstart.checkpoint.reader import Checkpoint
    from headstart.cli.demo_view import View, next_steps, setting_up, show_file, show_head, summary
    from headstart.demo import PROMPTS
    from headstart.demo.package import checked_path
    from headstart.demo.page import write_page
    from headstart.demo.race import mean_speed_up, race
    from headstart.demo.shipped import shipped_head
    from headstart.demo.unpacked import ready
    from headstart.heads.inspection import inspect

    started = time.monotonic()
    is_trained = shipped_head() is not None
    if gguf and not is_trained:
        raise ConfigError("--gguf was given and this copy ships no head to draft with; drop it.")
    with setting_up(quiet=json_output) as report:
        model = checked_path() if gguf else ready(report=report)
        report("loading the model twice, with and without its head")
        from headstart.demo.engines import open_engines

        head = shipped_head() if gguf else None
        engines = open_engines(model, weights=weights, threads=threads, head=head)
    if gguf and not json_output:
        show_file(model, time.monotonic() - started)
    elif not json_output:
        show_head(
            inspect(Checkpoint.open(model)), model, time.monotonic() - started,
            is_trained=is_trained,
        )  # fmt: skip
    races: list[Race] = []
    for category, question in PROMPTS.items():
        params = engines["plain"].prompts.default_params(max_tokens=max_tokens, temperature=0.0)
        with View(engines["plain"], question, params, quiet=json_output) as view:
            found = race(engines, question, params, category=category, show=view.show)
            view.finish(found)
        races.append(found)
    facts = _facts(weights)
    write_page(out / _PAGE, races, facts, engines["plain"].prompts.tokenizer)
    if json_output:
        mean = mean_speed_up(races)
        say(json.dumps({**facts, "races": [r.as_json() for r in races], "speed_up": mean}))
        return
    summary(races, is_trained=is_trained)
    next_steps(out / _PAGE, is_trained=is_trained)
    say(f"speed-up {mean_speed_up(races):.2f}x")


def _prepare(out: Path) -> None:
    """Refuse at once what the report could not be written to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteFailed(
            f"cannot make the folder {out}: {error.strerror}. Choose another --out."
        ) from error


def _facts(weights: str) -> dict[str, object]:
    import torch

    from headstart import __version__
    from headstart.bench.environment import processor_name
    from headstart.demo.shipped import head_digest, shipped_head, shipped_vocab

    head = shipped_head()
    return {
        "headstart": __version__,
        "head": head_digest(head)[:12] if head else "untrained: this copy ships no head",
        "draft vocabulary": "as shipped" if shipped_vocab() else "all tokens",
        "weights": "fp32" if weights == "as-dtype" else weights,
        "threads": torch.get_num_threads(),
        "processor": processor_name(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }
