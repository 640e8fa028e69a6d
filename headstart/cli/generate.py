"""`headstart generate MODEL ["prompt"]`: an answer, or a chat, with tokens tinted by origin."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headstart.cli.demo_defaults import with_shipped_vocab
from headstart.cli.options import Json, Model
from headstart.cli.spinning import limit_spinning
from headstart.engine.options import EngineOptions
from headstart.errors import ConfigError
from headstart.sampling.params import SamplingParams


def run(
    *,
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="What to answer, - to read it from stdin; without it, a chat.", show_default=False
        ),
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
    _check(prompt, options, compare=compare, json_output=json_output)
    if prompt == "-":
        prompt = _from_stdin()
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    changes |= {"max_tokens": max_tokens, "seed": seed, "stop": tuple(stop or ())}
    SamplingParams(**changes)  # what is wrong is said before a model is loaded
    limit_spinning()
    from headstart.cli.chat import answer, converse, loading
    from headstart.engine.compare import compare_runs
    from headstart.engine.engine import Engine

    with loading(model):
        engine = Engine(model, head, options=with_shipped_vocab(model, head, options))
    for note in engine.notes:
        print(f"note: {note}", file=sys.stderr)
    params = engine.prompts.default_params(ignore_eos=ignore_eos, **changes)
    if compare and engine.model.head is None:
        raise ConfigError("--compare needs a head and the model has none; give one with --head.")
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


def _from_stdin() -> str:
    try:
        text = sys.stdin.read().removesuffix("\n") if sys.stdin is not None else ""
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the prompt is -, and stdin is not text ({error}); pipe UTF-8."
        ) from error
    if not text:
        raise ConfigError("the prompt is -, and stdin is empty; pipe a text, or give a prompt.")
    return text


def _check(prompt: str | None, options: EngineOptions, *, compare: bool, json_output: bool) -> None:
    """Refuse what cannot mean anything, before a model is loaded for it."""
    for name, is_given in (("--compare", compare), ("--json", json_output)):
        if is_given and prompt is None:
            raise ConfigError(f"{name} was given without a prompt; a chat has no such result.")
    if compare and options.speculate == 0:
        raise ConfigError("--compare with --speculate 0 has nothing to compare; give a K or auto.")
