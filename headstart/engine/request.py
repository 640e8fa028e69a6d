"""One request: what was asked, what came out so far, how far it is computed.

`tokens` is prompt and output. Trunk slots [0, num_computed) are final. The last token is not
computed yet (except while a prompt is being read); drafts come after it. Numbers only: states of
the head are the `Drafter`'s, requests that decode on a device the `Rounds`'.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from torch import Tensor

from headstart.data.detokenizer import Detokenizer
from headstart.engine.grammar import GuardedGrammar
from headstart.engine.kept_states import KeptStates
from headstart.engine.options import MAX_DRAFTS
from headstart.engine.prompt_scores import PromptScores
from headstart.engine.state_cache import StateTrack
from headstart.engine.stats import RequestStats
from headstart.sampling.choose import TokenLogprob
from headstart.sampling.history import History
from headstart.sampling.params import Row, SamplingParams
from headstart.vocab.own_tokens import OwnTokens

MAX_PRIORITY = 10  # either way: few enough levels for waiting to make up for
# Waiting this long is worth one level of priority, for good: no request starves, and one that was
# admitted for its age does not become the first victim again.
_AGING_STEPS = 256

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
    def importance(self) -> tuple[int, int]:
        """Smaller is more important: priority, improved by all waiting so far, then arrival."""
        return self.priority - self.waited_steps // _AGING_STEPS, self.arrival

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
