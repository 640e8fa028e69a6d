"""From what a user asks to requests that an engine can run, or a clear no."""

from __future__ import annotations

from headstart.backends.base import LoadedModel
from headstart.data.prompt_reader import PromptReader
from headstart.engine.grammar import GuardedGrammar
from headstart.engine.options import MAX_DRAFTS, EngineOptions, is_speculate
from headstart.engine.output import Detokenizer
from headstart.engine.request import Request
from headstart.errors import PromptTooLong, RequestError, some
from headstart.sampling.params import SamplingParams, derive_seed


class Admission:
    """Knows what one engine can take: lengths, tokens, settings."""

    def __init__(
        self, model: LoadedModel, prompts: PromptReader, options: EngineOptions, *, num_slots: int
    ):
        self._model, self._prompts, self._options = model, prompts, options
        # Prompt and answer together: the model's length, or what the K/V memory holds for one.
        self.longest = min(model.max_len, num_slots - 1)

    def check(self, ids: list[int], params: SamplingParams) -> None:
        """Raise RequestError (or ConfigError) if the request cannot be answered as asked."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is a {type(params).__name__}; give SamplingParams.")
        vocab = self._model.config.vocab
        params.check_token_ids(vocab)
        if not ids:
            raise RequestError("the prompt is empty; give at least one token.", field="prompt")
        if min(ids) < 0 or max(ids) >= vocab:
            raise RequestError(
                f"the prompt holds token ids outside 0 to {vocab - 1}.", field="prompt"
            )
        if len(ids) >= self.longest:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens; prompt and answer together may have "
                f"{self.longest} (max_model_len, or the K/V memory). Shorten it.",
                field="prompt",
            )
        allowed = params.allowed_token_ids or ()
        free = set(allowed) - set(params.banned_token_ids or ()) - self.ends(params)
        if params.min_tokens and allowed and not free:
            raise RequestError(
                f"only end tokens are allowed ({some(allowed)}), and min_tokens forbids them for "
                f"{params.min_tokens} tokens. Allow another token, or leave min_tokens out.",
                field="allowed_token_ids",
            )
        is_profiled = self._options.speculate == "auto"
        if params.speculate == "auto" and not is_profiled and self._model.head is not None:
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
        if params.speculate and self._model.head is None:
            raise RequestError(
                f"the request asks for speculate {params.speculate} and this engine runs without a "
                "head (started with speculate 0, or the model has none). Leave the setting out.",
                field="speculate",
            )
        if params.stop and self._prompts.tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer and the checkpoint has none.", field="stop"
            )

    def ends(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end an answer to this request."""
        own = frozenset(params.stop_token_ids)
        return own if params.ignore_eos else own | self._prompts.end_ids

    def request(
        self,
        group: str,
        sample: int,
        ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        priority: int,
        grammar: GuardedGrammar | None,
        arrival: int,
        draft_vocab: str | None = None,
    ) -> Request:
        """One sample of a checked prompt."""
        room = self.longest - len(ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        request = Request(
            id=f"{group}/{sample}", prompt_ids=ids, params=params,
            seed=derive_seed(seed, sample), max_tokens=limit, end_ids=self.ends(params),
            arrival=arrival, priority=priority, group=group, sample=sample,
            grammar=grammar.fork() if grammar is not None else None, draft_vocab=draft_vocab,
        )  # fmt: skip
        request.stats.seed, request.stats.draft_vocab = seed, draft_vocab
        request.stats.max_tokens = limit
        tokenizer = self._prompts.tokenizer if params.detokenize else None
        if tokenizer is not None:
            request.text = Detokenizer(
                tokenizer, params.stop, skip_special=params.skip_special_tokens,
                keep_stop=params.include_stop_str_in_output, min_tokens=params.min_tokens,
            )  # fmt: skip
        return request
