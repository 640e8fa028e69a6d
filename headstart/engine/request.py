"""One request: what was asked and whether it can be, what came out so far, how far it is computed.

`tokens` is prompt and output. Trunk slots [0, num_computed) are final. The last token is not
computed yet (except while a prompt is being read); drafts come after it. Numbers only: states of
the head are the `Drafter`'s, requests that decode on a device the `Rounds`'.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from torch import Tensor

from headstart.backends.base import LoadedModel
from headstart.data.detokenizer import Detokenizer
from headstart.data.prompt_reader import PromptReader
from headstart.engine.grammar import Grammar, GuardedGrammar
from headstart.engine.kept_states import KeptStates
from headstart.engine.kv_cache import root_digest
from headstart.engine.options import MAX_DRAFTS, EngineOptions, is_speculate
from headstart.engine.prompt_scores import PromptScores
from headstart.engine.state_cache import StateTrack
from headstart.engine.stats import RequestStats
from headstart.errors import PromptTooLong, RequestError, some
from headstart.sampling.choose import TokenLogprob
from headstart.sampling.history import History
from headstart.sampling.params import Row, SamplingParams, derive_seed
from headstart.vocab.own_tokens import OwnRule, OwnTokens

MAX_PRIORITY = 10  # either way: few enough levels for waiting to make up for (scheduler.py)

FinishReason = Literal["stop", "length", "abort", "error"]


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


Origin = Literal["accepted", "copied", "recovered", "bonus"]


def origins(
    num_accepted: int, num_drafts: int, num_of_head: int = MAX_DRAFTS
) -> tuple[Origin, ...]:
    """Where each emitted token of one request comes from.

    Accepted drafts are the head's (`accepted`) or, after its first ones, copied from the context.
    The last one is the bonus token when every draft was accepted; without drafts, too, so that
    recovered and bonus tokens together count the passes of the trunk.
    """
    last: Origin = "bonus" if num_accepted == num_drafts else "recovered"
    accepted: Origin = "accepted"
    copied: Origin = "copied"
    num_copied = max(0, num_accepted - num_of_head)
    return (*[accepted] * (num_accepted - num_copied), *[copied] * num_copied, last)


@dataclass(eq=False)
class Request:
    """A single sequence; n > 1 is several of these."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int  # resolved: by params, model length and memory
    end_ids: frozenset[int]
    arrival: int  # order of submission
    priority: int = 0  # smaller is more important
    group: str = ""  # what the user submitted; several samples share it
    sample: int = 0
    draft_vocab: str | None = None  # which reduced LM head drafts; None: the whole one
    own: OwnTokens | None = None  # of its text, drafted beside that vocabulary; None: none are
    cache_root: bytes = b""  # blocks are shared with requests of the same one only
    grammar: GuardedGrammar | None = None
    state: State = State.WAITING
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of full blocks, as far as known
    num_registered: int = 0
    num_computed: int = 0
    num_cached: int = 0  # prompt tokens that a prefix hit saved, at the last start
    drafts: list[int] = field(default_factory=list)
    num_of_head: int = MAX_DRAFTS  # drafts from here on are copied
    states: StateTrack = field(default_factory=StateTrack)  # of recurrent layers
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_scores: PromptScores | None = None  # of the first sample, where they are asked for
    kept_states: KeptStates | None = None  # of the trunk, where they are asked for
    text: Detokenizer | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None  # what ended the request, where that was a failure
    stats: RequestStats = field(default_factory=RequestStats)
    waited_steps: int = 0  # in all, preemptions included
    created: float = field(default_factory=time.perf_counter)
    _history: History | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)

    @property
    def takes_most_likely(self) -> bool:
        """Whether every token, and so every guess, is the most likely one, whatever came before."""
        is_free = self.grammar is None and self.params.acceptance != "rejection"
        return is_free and self.params.is_plain_greedy

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.prompt_ids) :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.prompt_ids)

    @property
    def own_tokens(self) -> OwnTokens | None:
        """What it drafts beside its vocabulary, of all its tokens; None where there is none."""
        if self.own is None:
            return None
        self.own.read(self.tokens)
        return self.own if self.own.ids else None

    @property
    def history(self) -> History:
        """Its tokens, counted: what came since the last time is added."""
        if self._history is None:
            self._history = History(self.prompt_ids)
        self._history.add(self.tokens[len(self.prompt_ids) + self._history.num_output :])
        return self._history

    def row(self, drafts: Sequence[int], mask: Tensor | None, *, penalties: bool = True) -> Row:
        """What the choice of the token after `drafts` depends on; mask: what its grammar allows."""
        history = self.history if penalties and self.params.has_penalties else None
        return Row(
            params=self.params, seed=self.seed, position=len(self.tokens) + len(drafts),
            prompt_ids=self.prompt_ids if history is not None else (),
            output_ids=[*self.output_ids, *drafts] if history is not None else (),
            num_output=self.num_output + len(drafts), end_ids=self.end_ids, mask=mask,
            history=history,
        )  # fmt: skip

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed."""
        return self.prompt_scores is not None and not self.prompt_scores.is_done

    @property
    def is_decoding(self) -> bool:
        """Whether only the last token (and drafts) are left to compute."""
        return self.num_computed == len(self.tokens) - 1

    @property
    def room(self) -> int:
        """How many more tokens the request may get."""
        return self.max_tokens + len(self.prompt_ids) - len(self.tokens)

    def reset(self) -> None:
        """Back to the start after preemption: everything is computed again, tokens stay."""
        self.blocks, self.drafts, self.num_of_head = [], [], MAX_DRAFTS
        self.num_computed = self.num_registered = self.num_cached = 0
        self.states = StateTrack()
        self.state = State.WAITING


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
        closed = self.ends(params).union(params.banned_token_ids or ())
        if params.min_tokens and allowed and closed.issuperset(allowed):
            raise RequestError(
                f"only end tokens are allowed ({some(allowed)}), and min_tokens forbids them for "
                f"{params.min_tokens} tokens. Allow another token, or leave min_tokens out.",
                field="allowed_token_ids",
            )
        has_head = self._model.head is not None
        if params.speculate == "auto" and not self._options.is_automatic and has_head:
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
        copies = self._options.speculate == "context"
        can_draft = {"auto": True, "head": has_head, "context": has_head or copies}
        if not can_draft[params.draft_from]:
            raise RequestError(
                f"the request asks for draft_from {params.draft_from} and this engine runs without "
                f"{'a head' if params.draft_from == 'head' else 'drafts'}. Leave the setting out, "
                "or start it with a head, or with speculate context.", field="draft_from",
            )  # fmt: skip
        if params.speculate and not has_head and not copies:
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
        vocab = self._model.config.vocab
        guarded = GuardedGrammar(grammar, vocab) if grammar is not None else None
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
