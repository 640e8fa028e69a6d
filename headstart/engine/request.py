"""One request: what was asked, what came out so far, how far it is computed.

`tokens` is prompt and output. Trunk slots [0, num_computed) are final. The last token is not
computed yet (except while a prompt is being read); drafts come after it. Numbers only: states of
the head are the `Drafter`'s, requests that decode on a device the `Rounds`'.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

from headstart.engine.state_cache import StateTrack
from headstart.sampling.acceptance import Origin
from headstart.simulate.acceptance import Acceptance

if TYPE_CHECKING:
    from headstart.engine.grammar import GuardedGrammar
    from headstart.engine.output import Detokenizer
    from headstart.sampling.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of an emitted token and of the best alternatives at its place."""

    token: int
    logprob: float
    top: dict[int, float]


@dataclass
class RequestStats:
    """Counters and times of one request."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    queue_seconds: float | None = None  # until it ran for the first time
    first_token_seconds: float | None = None
    total_seconds: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    seed: int = 0
    max_tokens: int | None = None  # as resolved: by parameters, model length and memory
    draft_vocab: str | None = None  # None: the whole vocabulary


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
    grammar: GuardedGrammar | None = None
    state: State = State.WAITING
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of full blocks, as far as known
    num_registered: int = 0
    num_computed: int = 0
    num_cached: int = 0  # prompt tokens that a prefix hit saved, at the last start
    drafts: list[int] = field(default_factory=list)
    states: StateTrack = field(default_factory=StateTrack)  # of recurrent layers
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: Detokenizer | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None  # what ended the request, where that was a failure
    stats: RequestStats = field(default_factory=RequestStats)
    waited_steps: int = 0  # in all, preemptions included
    created: float = field(default_factory=time.perf_counter)

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
    def is_decoding(self) -> bool:
        """Whether only the last token (and drafts) are left to compute."""
        return self.num_computed == len(self.tokens) - 1

    @property
    def room(self) -> int:
        """How many more tokens the request may get."""
        return self.max_tokens - self.num_output

    def reset(self) -> None:
        """Back to the start after preemption: everything is computed again, tokens stay."""
        self.blocks, self.drafts = [], []
        self.num_computed = self.num_registered = self.num_cached = 0
        self.states = StateTrack()
        self.state = State.WAITING
