"""`headstart generate MODEL ["prompt"]`: an answer, or a chat, with tokens tinted by origin."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from headstart.cli.options import Json, Model
from headstart.engine.options import EngineOptions


def run(
    *,
    model: Model,
    prompt: Annotated[
        str | None, typer.Argument(help="What to answer; without it, a chat.", show_default=False)
    ] = None,
    options: EngineOptions,
    head: Annotated[
        Path | None,
        typer.Option("--head", "--draft-model", help="A head to use instead of the model's own."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Answer with and without drafts, and compare.")
    ] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the template.")] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Longest answer.")] = 256,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="Default: the model's own.")
    ] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Keep the k best tokens.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="Keep this much mass.")] = None,
    min_p: Annotated[float | None, typer.Option("--min-p", help="Keep tokens above this.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Same seed, same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End at this text.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end.")] = False,
    json_output: Json = False,
) -> None:
    from headstart.cli.chat import answer, converse
    from headstart.engine.compare import compare_runs
    from headstart.engine.engine import Engine

    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    changes = {name: value for name, value in given.items() if value is not None}
    engine = Engine(model, head, options=options)
    for note in engine.notes:
        print(f"note: {note}", file=sys.stderr)
    params = engine.prompts.default_params(
        max_tokens=max_tokens, seed=seed, stop=tuple(stop or ()), ignore_eos=ignore_eos, **changes
    )
    if prompt is None:
        converse(engine, params)
        return
    asked = [{"role": "user", "content": prompt}] if chat else prompt
    if compare:
        report = compare_runs(engine, asked, params)
        print(json.dumps(report.as_json()) if json_output else report.describe())
    elif json_output:
        print(json.dumps(answer(engine, asked, params, quiet=True)))
    else:
        answer(engine, asked, params, quiet=False)
