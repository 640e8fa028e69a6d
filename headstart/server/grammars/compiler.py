"""Grammars compiled by xgrammar, with the engine's methods: allowed(), accept(token), fork().

`GrammarCompiler` is called from worker threads. Grammars are compiled in another process, under
limits of time and memory (process.py), and read back here, for which xgrammar releases the
interpreter lock. What a compiled grammar may cost while it is used is bounded as well: an ambiguous
one can take seconds for a single token.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from headstart.errors import MissingExtra, RequestError, install
from headstart.sampling.masks import num_words, unpacked
from headstart.server.grammars.client import CompilerProcess
from headstart.server.grammars.specs import GrammarSpec
from headstart.server.pieces import special_ids

# Processor time that a grammar may take: a store that fills with every token.
_STORE_SECONDS, _SECONDS_PER_TOKEN = 0.25, 0.005
_CHAIN_SECONDS = _STORE_SECONDS  # by the clock, after which a chain is followed no further


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps the latest."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        *,
        end_ids: Iterable[int],
        markers: Iterable[str] = (),
        max_bytes: int = 1 << 16,
        max_seconds: float = 20.0,
        max_memory: int = 1 << 30,
        cache_bytes: int = 256 << 20,
    ):
        """`vocab_size` is the model's, which may be larger or smaller than the tokenizer's.

        Special tokens are not in the text of an answer, so no grammar may use them, except those
        whose text is one of the `markers`.
        """
        self._xgrammar = _xgrammar()
        self._info = _tokenizer_info(tokenizer, vocab_size, sorted(set(end_ids)), set(markers))
        special = frozenset((*self._info.special_token_ids, *self._info.stop_token_ids))
        self._tokens = _Tokens(vocab_size, self._info.vocab_size, special)
        self._max_bytes, self._cache_bytes = max_bytes, cache_bytes
        self._process = CompilerProcess(
            self._info.serialize_json(), max_seconds=max_seconds, max_memory=max_memory
        )
        self._compiled: OrderedDict[GrammarSpec, tuple[Any, int]] = OrderedDict()  # with its bytes
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> TokenGrammar:
        """Blocks for milliseconds, at most for `max_seconds` of a processor."""
        if spec.num_bytes > self._max_bytes:
            raise RequestError(
                f"the {spec.what} has {spec.num_bytes} bytes; this server takes up to "
                f"{self._max_bytes}. Make it smaller."
            )
        with self._lock:
            known = self._compiled.get(spec)
            if known is not None:
                self._compiled.move_to_end(spec)
        return self._at_start(known[0] if known is not None else self._compile(spec))

    def is_kept(self, spec: GrammarSpec) -> bool:
        return spec in self._compiled

    def _at_start(self, compiled: Any) -> TokenGrammar:
        matcher = self._xgrammar.GrammarMatcher(compiled)
        return TokenGrammar(matcher, self._tokens, _Allowance())

    def _compile(self, spec: GrammarSpec) -> Any:
        text = f'{{"type": "structural_tag", "format": {spec.text}}}'
        found = self._process.compile(spec.what, text)
        if len(found) > self._cache_bytes:
            raise RequestError(
                f"the {spec.what} has {len(found) >> 20} MiB when it is compiled; this server "
                f"takes up to {self._cache_bytes >> 20}. Make it smaller."
            )
        compiled = self._xgrammar.CompiledGrammar.deserialize_json(found, self._info)
        first = self._at_start(compiled).allowed()
        if first is not None and not first.any():
            raise RequestError(
                f"no text fits the {spec.what}: it never ends, or needs characters that the "
                "model's tokens do not have. Change it."
            )
        with self._lock:
            self._compiled[spec] = compiled, len(found)
            while self.num_cached_bytes > self._cache_bytes:
                self._compiled.popitem(last=False)
        return compiled

    @property
    def num_cached_bytes(self) -> int:
        """Bytes of the kept grammars, serialised: xgrammar's own count leaves large parts out."""
        return sum(size for _, size in self._compiled.values())

    def close(self) -> None:
        """End the process in which grammars are compiled."""
        self._process.close()


@dataclass(frozen=True)
class _Tokens:
    """Those of a model: `size` of them are known to xgrammar, the others never fit."""

    vocab_size: int
    size: int
    special: frozenset[int]

    def room(self, rows: int) -> np.ndarray:
        """Masks in which nothing is allowed, int32 [rows, words]."""
        return np.zeros((rows, num_words(self.vocab_size)), np.int32)

    def widened(self, known: np.ndarray) -> np.ndarray:
        """Masks of all tokens, from those of the known ones."""
        if self.size == self.vocab_size:
            return known
        masks = self.room(len(known))
        masks[:, : known.shape[1]] = known
        return masks

    def end_of(self, words: np.ndarray) -> None:
        """Clear what lies behind the last known token in its word."""
        spare = -self.size % 32
        if spare and self.size < self.vocab_size:
            words[..., self.size >> 5] &= (1 << (32 - spare)) - 1


class TokenGrammar:
    """Where one answer is in its grammar; the engine's grammar protocol."""

    def __init__(self, matcher: Any, tokens: _Tokens, allowance: _Allowance):
        self._matcher, self._tokens, self._allowance = matcher, tokens, allowance

    def allowed_words(self) -> np.ndarray | None:
        """Bits of the tokens that may come next; the end token's where the text may end."""
        words, started = self._tokens.room(1), time.thread_time()
        is_mask = self._fill(words)
        self._allowance.spend(time.thread_time() - started)
        return words[0] if is_mask else None

    def chain_words(self, drafts: Sequence[int]) -> list[np.ndarray | None]:
        """The same behind 0, 1, ... drafts, up to the first one that does not fit."""
        tokens, started = self._tokens, time.thread_time()
        drafts = list(takewhile(lambda token: token < tokens.size, drafts))
        rows = len(drafts) + 1
        known = np.zeros((rows, num_words(tokens.size)), np.int32)  # xgrammar ignores strides
        is_whole = self._matcher.traverse_draft_tree(
            np.array([*range(1, rows), -1]), np.full(rows, -1), np.array([0, *drafts]), known,
            _CHAIN_SECONDS,
        )  # fmt: skip
        fitting = 0
        while is_whole and fitting < len(drafts) and _has(known[fitting], drafts[fitting]):
            fitting += 1
        self._allowance.spend(time.thread_time() - started - _SECONDS_PER_TOKEN * fitting)
        if not is_whole:  # others held up the thread: what would follow the drafts is not known
            return [self.allowed_words()]
        masks = tokens.widened(known[: fitting + 1])
        tokens.end_of(masks)
        return list(masks)

    def _fill(self, words: np.ndarray) -> bool:
        """Whether a mask [1, words] that allows nothing became one, or all tokens may come."""
        if self._matcher.is_terminated():
            return True
        tokens = self._tokens
        known = words[:, : num_words(tokens.size)]
        if not self._matcher.fill_next_token_bitmask(known):
            if tokens.size == tokens.vocab_size:
                return False
            known[:] = -1
        tokens.end_of(words)
        return True

    def allowed(self) -> torch.Tensor | None:
        """The same, bool [vocab_size]."""
        words = self.allowed_words()
        return None if words is None else unpacked(words, self._tokens.vocab_size)

    def accept(self, token: int) -> bool:
        started = time.thread_time()
        fits = self._accept(token)
        self._allowance.spend(time.thread_time() - started - _SECONDS_PER_TOKEN)
        return fits

    def _accept(self, token: int) -> bool:
        # Asked about tokens behind the end, or special ones that do not fit, xgrammar would warn on
        # standard error; drafts hold both.
        if token >= self._tokens.size or self._matcher.is_terminated():
            return False
        if token in self._tokens.special and not self._allows(token):
            return False
        return bool(self._matcher.accept_token(token))

    def fork(self) -> TokenGrammar:
        return TokenGrammar(self._matcher.fork(), self._tokens, self._allowance)

    def _allows(self, token: int) -> bool:
        words = self.allowed_words()
        return words is None or _has(words, token)


def _has(words: np.ndarray, token: int) -> bool:
    """Whether a mask allows a token; one that it has no bit for is not allowed."""
    at = token >> 5
    return 0 <= at < len(words) and bool((int(words[at]) >> (token & 31)) & 1)


class _Allowance:
    """Processor seconds that a request's grammar may still take; shared by its forks."""

    def __init__(self) -> None:
        self._left = _STORE_SECONDS

    def spend(self, seconds: float) -> None:
        if self._left >= 0:  # a store that was empty once stays empty: every fork must fail alike
            self._left = min(_STORE_SECONDS, self._left - seconds)
        if self._left < 0:
            raise RequestError(
                "the grammar takes too long to follow: it is ambiguous, or repeats what repeats. "
                "Write it so that a text fits in one way only."
            )


def _tokenizer_info(tokenizer: Any, vocab_size: int, end_ids: list[int], markers: set[str]) -> Any:
    xgrammar = _xgrammar()
    if tokenizer is None:
        raise RequestError("grammars need a tokenizer and the checkpoint has none.")
    if tokenizer.is_fast and tokenizer.backend_tokenizer.decoder is None:
        # Such tokens are joined with blanks, which no grammar over their texts allows for.
        raise RequestError(
            "grammars need tokens that are pieces of text; this model's tokenizer.json has no "
            "decoder, so its tokens are whole words. Ask without a grammar."
        )
    ends = [token for token in end_ids if token < vocab_size]
    found = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=ends or [vocab_size - 1]
    )
    texts = list(found.decoded_vocab)
    for token in special_ids(tokenizer) - set(ends):
        if token < len(texts) and texts[token].decode("utf-8", "replace") not in markers:
            texts[token] = b""  # xgrammar never allows a token without text
    # It goes through all tokens without text for every mask, and for every token it accepts: those
    # behind the tokenizer's last one, which a model may have many of, are left out.
    known = max((token for token, text in enumerate(texts) if text), default=0)
    size = min(vocab_size, max([known, *ends]) + 1)
    return xgrammar.TokenizerInfo(
        texts[:size], xgrammar.VocabType.RAW, vocab_size=size, stop_token_ids=ends,
        add_prefix_space=found.add_prefix_space,
    )  # fmt: skip


def _xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise MissingExtra(
            f"grammars need xgrammar, which is not installed. Install it: {install('serve')}."
        ) from error
    return xgrammar
