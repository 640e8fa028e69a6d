"""`headstart generate MODEL ["prompt"]`: an answer, or a chat, with tokens tinted by origin."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.segment import Segment, Segments

from headstart.cli.demo_defaults import with_shipped_vocab
from headstart.cli.look import ORIGIN_STYLES
from headstart.cli.models import check_head, check_model
from headstart.cli.options import Head, Json, Model
from headstart.cli.spinning import limit_spinning
from headstart.data.detokenizer import Detokenizer
from headstart.data.prompt_reader import Prompt
from headstart.engine.options import EngineOptions
from headstart.errors import ConfigError, RequestError
from headstart.report.terminal import CONTROLS, say
from headstart.sampling.params import SamplingParams

if TYPE_CHECKING:  # torch may not be loaded before `limit_spinning`
    from headstart.engine.engine import Engine
    from headstart.engine.output import Update


class Tint:
    """Which characters of a text came from which token.

    Text arrives later than its tokens where a character is incomplete or may begin a stop string,
    so the lengths of tokens wait in a queue for their characters.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams):
        # Without stop strings: every token's text counts, whether it is shown or not.
        self._text = Detokenizer(
            tokenizer, (), skip_special=params.skip_special_tokens, keep_stop=True
        )
        self._waiting: deque[tuple[int, str]] = deque()

    def pieces(
        self, text: str, token_ids: Sequence[int], origins: Sequence[str]
    ) -> Iterator[tuple[str, str]]:
        """Parts of `text` with the colour of the token that each came from."""
        for token, origin in zip(token_ids, origins, strict=True):
            before = len(self._text.text)
            self._text.add(token)
            self._waiting.append((len(self._text.text) - before, ORIGIN_STYLES[origin]))
        colour = "default"
        while text:
            if self._waiting:
                count, colour = self._waiting.popleft()
            else:  # the end of a text may be more than its tokens gave one by one
                count = len(text)
            if count > len(text):
                self._waiting.appendleft((count - len(text), colour))
            if count:
                yield text[:count], colour
            text = text[count:]


def answer(
    engine: Engine, prompt: Prompt, params: SamplingParams, *, quiet: bool, raw: bool = False
) -> dict[str, Any]:
    """Stream one answer; returns text, tokens and its own counters.

    raw: nothing but the text, with all its control characters; not for terminals.
    """
    console = Console(highlight=False, soft_wrap=True)
    tint = Tint(engine.prompts.tokenizer, params) if engine.prompts.tokenizer else None
    request_id = engine.add(prompt, params)
    try:
        while engine.has_work:
            for update in engine.step():
                if quiet or tint is None or update.request_id != request_id:
                    continue
                if raw:
                    sys.stdout.write(update.text)
                    sys.stdout.flush()
                else:
                    _show(console, tint, update)
    finally:
        engine.abort(request_id)  # nothing is left of it after Ctrl-C
        result = engine.collect(request_id)
        if not quiet and not raw:
            console.print()  # what is said of the answer has lines of its own
    (said,) = result.outputs
    if said.error is not None:
        raise RequestError(said.error)
    stats = said.stats.acceptance
    asked = params.max_tokens or 0
    if said.finish_reason == "length" and len(said.token_ids) < asked:
        print(
            f"note: ended after {len(said.token_ids)} of {asked} tokens: prompt and "
            f"answer may have {engine.admission.longest} (max_model_len, or the K/V memory)",
            file=sys.stderr,
        )
    if not quiet:
        is_cut = said.finish_reason == "length" and len(said.token_ids) == asked
        cut = f"; cut off at {asked} tokens (--max-tokens)" if is_cut else ""
        print(
            f"{len(said.token_ids)} tokens in {stats.rounds} rounds, acceptance length "
            f"{stats.length:.2f}{_copied(said.stats.copied_accepted)}{cut}",
            file=sys.stderr,
        )
    return {
        "text": said.text,
        "token_ids": said.token_ids,
        "origins": said.origins,
        "finish_reason": said.finish_reason,
        "acceptance": stats.as_json(),
        "copied_tokens": said.stats.copied_accepted,
    }


def _copied(count: int) -> str:
    return f", {count} of them copied from the context" if count else ""


def _show(console: Console, tint: Tint, update: Update) -> None:
    for piece, colour in tint.pieces(update.text, update.token_ids, update.origins):
        # Not as rich's Text, which would make blanks of tabs and drop some control characters.
        text = piece.translate(CONTROLS)
        console.print(Segments([Segment(text, console.get_style(colour))]), end="")


def converse(engine: Engine, params: SamplingParams) -> None:
    """A chat until the input ends."""
    messages: list[dict[str, str]] = []
    say("chat; end with Ctrl-D", file=sys.stderr)
    while True:
        try:
            asked = input("> ")
        except EOFError:
            say(file=sys.stderr)
            return
        if not asked.strip():
            continue
        messages.append({"role": "user", "content": asked})
        try:
            said = answer(engine, messages, params, quiet=False)
        except RequestError as error:
            messages.pop()
            say(f"error: {error}", file=sys.stderr)
            continue
        except KeyboardInterrupt:  # ends the answer, not the chat
            messages.pop()
            say("stopped; end with Ctrl-D", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": str(said["text"])})


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Say on a terminal that a model is being loaded, which may take minutes."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(f"loading {model}"):
        yield


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
    head: Head = None,
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
    raw: Annotated[
        bool, typer.Option("--raw", help="Control characters as they are; into a pipe or file.")
    ] = False,
    json_output: Json = False,
) -> None:
    _check(prompt, options, compare=compare, json_output=json_output, raw=raw)
    if prompt == "-":
        prompt = _from_stdin()
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    changes |= {"max_tokens": max_tokens, "seed": seed, "stop": tuple(stop or ())}
    SamplingParams(**changes)  # what is wrong is said before a model is loaded
    if max_tokens < 1:  # servers are asked so for a prompt's log-probabilities
        raise ConfigError(f"--max-tokens is {max_tokens}; give a whole number of at least 1.")
    check_model(model)
    check_head(head if options.runs_head else None)
    limit_spinning()
    from headstart.engine.compare import compare_runs
    from headstart.engine.engine import Engine

    with loading(model):
        engine = Engine(model, head, options=with_shipped_vocab(model, head, options))
    for note in engine.notes:
        print(f"note: {note}".translate(CONTROLS), file=sys.stderr)
    params = engine.prompts.default_params(ignore_eos=ignore_eos, **changes)
    if compare and engine.model.head is None and options.speculate != "context":
        raise ConfigError(
            "--compare needs a head and the model has none; give one with --head, or --speculate "
            "context."
        )
    if prompt is None:
        converse(engine, params)
        return
    asked = [{"role": "user", "content": prompt}] if chat else prompt
    if compare:
        report = compare_runs(engine, asked, params)
        say(json.dumps(report.as_json()) if json_output else report.describe())
    elif json_output:
        say(json.dumps(answer(engine, asked, params, quiet=True)))
    else:
        answer(engine, asked, params, quiet=False, raw=raw)


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


def _check(
    prompt: str | None, options: EngineOptions, *, compare: bool, json_output: bool, raw: bool
) -> None:
    """Refuse what cannot mean anything, before a model is loaded for it."""
    if raw and (compare or json_output):
        raise ConfigError("--raw is for a plain answer; leave out --compare and --json, or --raw.")
    if raw and sys.stdout.isatty():
        raise ConfigError(
            "--raw was given and the output is a terminal, which control characters would steer. "
            "Pipe it, or write it to a file."
        )
    for name, is_given in (("--compare", compare), ("--json", json_output), ("--raw", raw)):
        if is_given and prompt is None:
            raise ConfigError(f"{name} was given without a prompt; a chat has no such result.")
    if compare and options.speculate == 0:
        raise ConfigError("--compare with --speculate 0 has nothing to compare; give a K or auto.")
