"""The text of an answer whose tokens arrive one by one, or several at once.

A token may end in the middle of a character, so text is handed out only as far as it cannot change
any more and cannot become part of a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from headstart.errors import library_fault, tokenizer_failed

_BROKEN = "\ufffd"  # what decoders put for bytes that are not yet a character
_MODEL = "the model"  # clients of a server are told no path of its machine


class Decoder(Protocol):
    """What turns tokens into text: a tokenizer of transformers or tokenizers."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


def _decoder(tokenizer: Decoder) -> Callable[..., str]:
    """The tokenizer's `decode`, or what it calls: every token of every answer goes this way."""
    inner: Decoder | None = getattr(tokenizer, "backend_tokenizer", None)
    is_plain = inner is not None and not getattr(tokenizer, "clean_up_tokenization_spaces", False)
    return inner.decode if inner is not None and is_plain else tokenizer.decode


def _no_text(tokens: list[int], *, skip_special_tokens: bool) -> str:
    return ""


class WholeTexts(dict[int, str | None]):
    """Texts of single tokens, None of those that are no whole characters.

    Where a decoder puts the bytes of its tokens one behind another, as `ByteLevel` does, the text
    of tokens that are whole characters is that of each of them, one behind another.
    """

    def __init__(self, decoded: Callable[..., str], *, skip_special: bool):
        super().__init__()
        self._decoded, self._skip_special = decoded, skip_special

    def __missing__(self, token: int) -> str | None:
        try:
            text = str(self._decoded([token], skip_special_tokens=self._skip_special))
        except BaseException as error:
            if library_fault(error) is None:
                raise
            return None  # whoever decodes it with others says why
        self[token] = found = None if _BROKEN in text else text
        return found


_WHOLE = WeakKeyDictionary[Decoder, dict[bool, WholeTexts]]()  # by whether specials are skipped


def _whole_texts(tokenizer: Decoder, *, skip_special: bool) -> WholeTexts | None:
    """Of a tokenizer whose decoder makes texts so; shared by all answers."""
    decoded, inner = _decoder(tokenizer), getattr(tokenizer, "backend_tokenizer", None)
    if inner is None or decoded != inner.decode or not str(inner.decoder).startswith("ByteLevel("):
        return None
    known = _WHOLE.setdefault(tokenizer, {})
    if skip_special not in known:
        known[skip_special] = WholeTexts(decoded, skip_special=skip_special)
    return known[skip_special]


class Detokenizer:
    """The text of one growing sequence."""

    def __init__(
        self,
        tokenizer: Decoder,
        stops: Sequence[str],
        *,
        skip_special: bool,
        keep_stop: bool,
        min_tokens: int = 0,
    ):
        self._decoded, self._stops = _decoder(tokenizer), tuple(stops)
        self._skip_special, self._keep_stop = skip_special, keep_stop
        self._whole = _whole_texts(tokenizer, skip_special=skip_special)
        self._min_tokens = min_tokens  # no stop string ends before the token after these
        self._tokens: list[int] = []
        self._prefix = 0  # decoding starts here, so that a word keeps its leading space
        self._read = 0
        self.text = ""
        self.error: str | None = None  # why decoding ended; the text until then stays
        self._given = 0

    @property
    def looks_for_stops(self) -> bool:
        return bool(self._stops)

    def add_all(self, tokens: Sequence[int]) -> int:
        """Take tokens where no stop string is looked for; how many: decoding may fail at one."""
        if self._whole is not None and self._read == len(self._tokens):
            texts = [text for token in tokens if (text := self._whole[token]) is not None]
            if len(texts) == len(tokens):
                self._tokens += tokens
                self._prefix, self._read = len(self._tokens) - 1, len(self._tokens)
                self.text += "".join(texts)
                return len(tokens)
        for count, token in enumerate(tokens, 1):
            self.add(token)
            if self.error is not None:
                return count
        return len(tokens)

    def add(self, token: int) -> str | None:
        """Take one token; returns the stop string that is now complete, if any."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._prefix : self._read])
        after = self._decode(self._tokens[self._prefix :])
        if after.endswith(_BROKEN) or len(after) <= len(before):
            return None
        self._prefix, self._read = self._read, len(self._tokens)
        scanned = len(self.text)
        self.text += after[len(before) :]
        return self._find_stop(scanned) if len(self._tokens) > self._min_tokens else None

    def finish(self) -> None:
        """No more tokens: what is still held back is text as it is."""
        before = self._decode(self._tokens[self._prefix : self._read])
        self.text += self._decode(self._tokens[self._prefix :])[len(before) :]
        self._prefix = self._read = len(self._tokens)

    def take(self, *, is_last: bool) -> str:
        """The part of the text that is safe to show and was not shown yet."""
        end = len(self.text) if is_last else len(self.text) - self._held_back()
        part = self.text[self._given : max(end, self._given)]
        self._given += len(part)
        return part

    def _decode(self, tokens: list[int]) -> str:
        try:
            return str(self._decoded(tokens, skip_special_tokens=self._skip_special))
        except BaseException as error:
            fault = library_fault(error)
            if fault is None:
                raise
            self.error = tokenizer_failed(_MODEL, fault)
            self._decoded = _no_text  # the tokens behind this one would fail as well
            return ""

    def _find_stop(self, scanned: int) -> str | None:
        """The stop string that completes first; the text is cut there."""
        found = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := self.text.find(stop, max(0, scanned - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        end, at, stop = min(found)
        self.text = self.text[: end if self._keep_stop else at]
        return stop

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            tail = self.text[-(len(stop) - 1) :] if len(stop) > 1 else ""
            at = tail.find(stop[0])
            while 0 <= at < len(tail) - longest:
                if stop.startswith(tail[at:]):
                    longest = len(tail) - at
                    break
                at = tail.find(stop[0], at + 1)
        return longest
