"""Which requests an engine can answer, and the `Request` objects made of one that was checked.

Everything that can be wrong with a request is said here, before anything of it is queued.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from headstart.backends.base import LoadedModel
from headstart.data.detokenizer import Detokenizer
from headstart.data.prompt_reader import PromptReader
from headstart.engine.grammar import Grammar, GuardedGrammar
from headstart.engine.kv_cache import root_digest
from headstart.engine.options import MAX_DRAFTS, EngineOptions, is_speculate
from headstart.engine.prompt_scores import PromptScores
from headstart.engine.request import MAX_PRIORITY, Request
from headstart.errors import PromptTooLong, RequestError, some
from headstart.sampling.params import SamplingParams, derive_seed
from headstart.vocab.own_tokens import OwnRule


@dataclass(frozen=True)
class Asked:
    """A prompt that was read and checked."""

    ids: list[int]
    params: SamplingParams
    draft_vocab: str | None
    own: OwnRule | None = None  # of tokens that are drafted beside the vocabulary


class Admission:
    """Which requests one engine can take, by lengths, tokens and settings; makes them."""

    def __init__(
        self, model: LoadedModel, prompts: PromptReader, options: EngineOptions, *, num_slots: int
    ):
        self._prompts, self._num_tokens = prompts, model.config.vocab
        # Prompt and answer together: the model's length, or what the K/V memory holds for one.
        self.longest = min(model.max_len, num_slots - 1)
        self._has_head, self._is_automatic = model.head is not None, options.is_automatic
        self._can_draft = self._has_head or options.speculate == "context"

    def check(self, ids: list[int], params: SamplingParams) -> None:
        """Raise RequestError (or ConfigError) if the request cannot be answered as asked."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is a {type(params).__name__}; give SamplingParams.")
        params.check_token_ids(self._num_tokens)
        self._check_prompt(ids)
        self._check_end(params)
        self._check_drafting(params)

    def _check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise RequestError("the prompt is empty; give at least one token.", field="prompt")
        if min(ids) < 0 or max(ids) >= self._num_tokens:
            raise RequestError(
                f"the prompt holds token ids outside 0 to {self._num_tokens - 1}.", field="prompt"
            )
        if len(ids) >= self.longest:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens; prompt and answer together may have "
                f"{self.longest} (max_model_len, or the K/V memory). Shorten it.",
                field="prompt",
            )

    def _check_end(self, params: SamplingParams) -> None:
        """Whether an answer can end, and go on until then."""
        allowed = params.allowed_token_ids or ()
        closed = self.ends(params).union(params.banned_token_ids or ())
        if params.min_tokens and allowed and closed.issuperset(allowed):
            raise RequestError(
                f"only end tokens are allowed ({some(allowed)}), and min_tokens forbids them for "
                f"{params.min_tokens} tokens. Allow another token, or leave min_tokens out.",
                field="allowed_token_ids",
            )
        if params.stop and self._prompts.tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer and the checkpoint has none.", field="stop"
            )

    def _check_drafting(self, params: SamplingParams) -> None:
        """Whether this engine can draft so many tokens, from there."""
        if params.speculate == "auto" and not self._is_automatic and self._has_head:
            raise RequestError(
                "speculate auto needs an engine that was started with speculate auto and has "
                "timed its rounds. Start it so (serve --speculate auto), or give a number.",
                field="speculate",
            )
        if params.speculate is not None and not is_speculate(params.speculate):
            raise RequestError(
                f"speculate is {params.speculate}; this engine drafts up to {MAX_DRAFTS} tokens.",
                field="speculate",
            )
        needs_head = params.draft_from == "head"
        if params.draft_from != "auto" and not (self._has_head if needs_head else self._can_draft):
            raise RequestError(
                f"the request asks for draft_from {params.draft_from} and this engine runs without "
                f"{'a head' if needs_head else 'drafts'}. Leave the setting out, "
                "or start it with a head, or with speculate context.", field="draft_from",
            )  # fmt: skip
        if params.speculate and not self._can_draft:
            raise RequestError(
                f"the request asks for speculate {params.speculate} and this engine runs without a "
                "head (started with speculate 0, or the model has none). Leave the setting out.",
                field="speculate",
            )

    def ends(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end an answer to this request."""
        own = frozenset(params.stop_token_ids)
        return own if params.ignore_eos else own | self._prompts.end_ids

    def requests(
        self, group: str, asked: Asked, *, arrival: int, priority: int, grammar: Grammar | None,
        cache_salt: str | None,
    ) -> list[Request]:  # fmt: skip
        """All samples of a checked prompt, the first of which arrives as number `arrival`."""
        if type(priority) is not int or abs(priority) > MAX_PRIORITY:
            raise RequestError(
                f"priority is {priority!r}; give a whole number from {-MAX_PRIORITY} to "
                f"{MAX_PRIORITY}, smaller is more important.", field="priority",
            )  # fmt: skip
        if cache_salt is not None and (type(cache_salt) is not str or not cache_salt):
            raise RequestError(
                "cache_salt is no text, or an empty one; give some text, or leave it out.",
                field="cache_salt",
            )
        params = asked.params
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        guarded = GuardedGrammar(grammar, self._num_tokens) if grammar is not None else None
        return [
            self.request(
                group, sample, asked.ids, params, seed=seed, priority=priority, grammar=guarded,
                arrival=arrival + sample, draft_vocab=asked.draft_vocab, own=asked.own,
                cache_salt=cache_salt,
            )
            for sample in range(params.n)
        ]  # fmt: skip

    def request(
        self, group: str, sample: int, ids: list[int], params: SamplingParams, *, seed: int,
        priority: int, grammar: GuardedGrammar | None, arrival: int,
        draft_vocab: str | None = None, own: OwnRule | None = None, cache_salt: str | None = None,
    ) -> Request:  # fmt: skip
        """One sample of a checked prompt."""
        room = self.longest - len(ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        request = Request(
            id=f"{group}/{sample}", prompt_ids=ids, params=params,
            seed=derive_seed(seed, sample), max_tokens=limit, end_ids=self.ends(params),
            arrival=arrival, priority=priority, group=group, sample=sample,
            grammar=grammar.fork() if grammar is not None else None, draft_vocab=draft_vocab,
            own=None if own is None else own.start(), cache_root=root_digest(cache_salt),
        )  # fmt: skip
        request.stats.seed, request.stats.draft_vocab = seed, draft_vocab
        request.stats.max_tokens = limit
        if params.prompt_logprobs is not None and sample == 0:
            request.prompt_scores = PromptScores(ids, params.prompt_logprobs)
        tokenizer = self._prompts.tokenizer if params.detokenize else None
        if tokenizer is not None:
            request.text = Detokenizer(
                tokenizer, params.stop, skip_special=params.skip_special_tokens,
                keep_stop=params.include_stop_str_in_output, min_tokens=params.min_tokens,
            )  # fmt: skip
        return request
