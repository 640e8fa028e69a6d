"""Where each token came from, and the text it brought, for clients that ask."""

from __future__ import annotations

from typing import Any

from headstart.engine.outputs import Completion, Update
from headstart.engine.text import Detokenizer


class OriginText:
    """Splits the text of one sample by tokens.

    Text that waits (it may begin a stop string) belongs to tokens of an earlier chunk: such
    chunks carry origins only.
    """

    def __init__(self, tokenizer: Any, *, skip_special: bool):
        self._text = Detokenizer(tokenizer, (), skip_special=skip_special, keep_stop=True)

    def of(self, update: Update | Completion) -> dict[str, Any]:
        texts = []
        for token in update.token_ids:
            before = len(self._text.text)
            self._text.add(token)
            texts.append(self._text.text[before:])
        shown: dict[str, Any] = {"origins": list(update.origins)}
        if "".join(texts) == update.text:
            shown["token_texts"] = texts
        return shown
