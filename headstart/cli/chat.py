"""Answers on a terminal: streamed, each token tinted by where it came from."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.text import Text

from headstart.data.prompt_reader import Prompt
from headstart.engine.engine import Engine
from headstart.engine.output import Detokenizer, Update
from headstart.errors import RequestError
from headstart.sampling.params import SamplingParams

_COLOURS = {"accepted": "green", "recovered": "red", "bonus": "default"}


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
            self._waiting.append((len(self._text.text) - before, _COLOURS[origin]))
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
    engine: Engine, prompt: Prompt, params: SamplingParams, *, quiet: bool
) -> dict[str, Any]:
    """Stream one answer; returns text, tokens and its own counters."""
    console = Console(highlight=False, soft_wrap=True)
    tint = Tint(engine.prompts.tokenizer, params) if engine.prompts.tokenizer else None
    request_id = engine.add(prompt, params)
    try:
        while engine.has_work:
            for update in engine.step():
                if not quiet and tint is not None and update.request_id == request_id:
                    _show(console, tint, update)
    finally:
        engine.abort(request_id)  # nothing is left of it after Ctrl-C
        result = engine.collect(request_id)
    (said,) = result.outputs
    stats = said.stats.acceptance
    asked = params.max_tokens or 0
    if said.finish_reason == "length" and len(said.token_ids) < asked:
        print(
            f"note: ended after {len(said.token_ids)} of {asked} tokens: prompt and "
            f"answer may have {engine.admission.longest} (max_model_len, or the K/V memory)",
            file=sys.stderr,
        )
    if not quiet:
        console.print()
        print(
            f"{len(said.token_ids)} tokens in {stats.rounds} rounds, acceptance length "
            f"{stats.length:.2f}",
            file=sys.stderr,
        )
    return {
        "text": said.text,
        "token_ids": said.token_ids,
        "origins": said.origins,
        "finish_reason": said.finish_reason,
        "acceptance": stats.as_json(),
    }


def _show(console: Console, tint: Tint, update: Update) -> None:
    for piece, colour in tint.pieces(update.text, update.token_ids, update.origins):
        console.print(Text(piece, style=colour), end="")


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


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Say on a terminal that a model is being loaded, which may take minutes."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(f"loading {model}"):
        yield
