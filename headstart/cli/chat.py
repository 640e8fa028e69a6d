"""Answers on a terminal: streamed, each token tinted by where it came from."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from headstart.data.prompt_reader import Prompt
from headstart.engine.engine import Engine
from headstart.errors import RequestError
from headstart.sampling.params import SamplingParams

_COLOURS = {"accepted": "green", "recovered": "red", "bonus": "default"}


def answer(
    engine: Engine, prompt: Prompt, params: SamplingParams, *, quiet: bool
) -> dict[str, Any]:
    """Stream one answer; returns text, tokens and counters."""
    console = Console(highlight=False, soft_wrap=True)
    before = engine.stats.acceptance.rounds
    text, tokens, origins, reason = "", [], [], None
    for update in engine.stream(prompt, params):
        text += update.text
        tokens += update.token_ids
        origins += update.origins
        reason = update.finish_reason
        if not quiet and update.text:
            # Several tokens may arrive at once; the colour of the last says how the round ended.
            kinds = set(update.origins)
            colour = "accepted" if "accepted" in kinds else next(iter(kinds))
            console.print(Text(update.text, style=_COLOURS[colour]), end="")
    stats = engine.stats.acceptance
    if not quiet:
        console.print()
        rounds = stats.rounds - before
        print(
            f"{len(tokens)} tokens in {rounds} rounds, acceptance length {stats.length:.2f}",
            file=sys.stderr,
        )
    return {
        "text": text,
        "token_ids": tokens,
        "origins": origins,
        "finish_reason": reason,
        "acceptance": stats.as_json(),
    }


def converse(engine: Engine, params: SamplingParams) -> None:
    """A chat until the input ends."""
    messages: list[dict[str, str]] = []
    print("chat; end with Ctrl-D", file=sys.stderr)
    while True:
        try:
            asked = input("> ")
        except EOFError:
            print(file=sys.stderr)
            return
        if not asked.strip():
            continue
        messages.append({"role": "user", "content": asked})
        try:
            said = answer(engine, messages, params, quiet=False)
        except RequestError as error:
            messages.pop()
            print(f"error: {error}", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": str(said["text"])})
