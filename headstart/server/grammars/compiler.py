"""Grammars compiled by xgrammar, with the engine's methods: allowed(), accept(token), fork().

`GrammarCompiler` is called from worker threads. Grammars are compiled in another process, under
limits of time and memory (process.py), and read back here, for which xgrammar releases the
interpreter lock. `token_grammar.py` has what is done with a compiled one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from copy import copy
from typing import Any

from headstart.errors import HeadstartError, MissingExtra, RequestError, install
from headstart.server.grammars.client import CompilerProcess
from headstart.server.grammars.specs import GrammarSpec
from headstart.server.grammars.token_grammar import Allowance, KnownTokens, TokenGrammar
from headstart.server.pieces import special_ids


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
        ends = frozenset(self._info.stop_token_ids)
        special = ends.union(self._info.special_token_ids)
        self._tokens = KnownTokens(vocab_size, self._info.vocab_size, special, ends)
        self._max_bytes, self._cache_bytes = max_bytes, cache_bytes
        self._process = CompilerProcess(
            self._info.serialize_json(), max_seconds=max_seconds, max_memory=max_memory
        )
        self._compiled: OrderedDict[GrammarSpec, tuple[Any, int]] = OrderedDict()  # with its bytes
        self._under_way: dict[GrammarSpec, Future[Any]] = {}  # for all that ask for the same
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
            under_way = self._under_way.get(spec)
            if known is not None:
                self._compiled.move_to_end(spec)
            elif under_way is None:
                own = self._under_way[spec] = Future()
        if known is not None:
            return self._at_start(known[0])
        if under_way is not None:
            return self._at_start(_result_of(under_way))
        try:
            own.set_result(self._compile(spec))
        except BaseException as error:
            own.set_exception(error)
        finally:
            with self._lock:
                del self._under_way[spec]
        return self._at_start(own.result())

    def is_kept(self, spec: GrammarSpec) -> bool:
        return spec in self._compiled

    def _at_start(self, compiled: Any) -> TokenGrammar:
        matcher = self._xgrammar.GrammarMatcher(compiled)
        return TokenGrammar(matcher, self._tokens, Allowance())

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


def _result_of(under_way: Future[Any]) -> Any:
    """Of what another request compiles; an error of its own, which gets the name of its field."""
    try:
        return under_way.result()
    except HeadstartError as error:
        raise copy(error) from None
