"""What one request asks of the sampler, and one row of logits with all that its choice depends on.

Values are checked before anything runs, and never change while a request runs: a value that
depended on the step would make the text depend on how many tokens a step produces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from headstart.sampling.checks import check, check_vocabulary

if TYPE_CHECKING:
    from torch import Tensor

    from headstart.sampling.history import History
    from headstart.sampling.restrictions import Restrictions


LogprobsMode = Literal["raw", "processed"]
AcceptanceRule = Literal["match", "rejection"]
DraftFrom = Literal["auto", "head", "context"]
_CHOICES = {
    "logprobs_mode": get_args(LogprobsMode), "acceptance": get_args(AcceptanceRule),
    "draft_from": get_args(DraftFrom),
}  # fmt: skip


_T = TypeVar("_T")


def _setting(default: _T, help_text: str) -> _T:
    """A field of `SamplingParams`, with its help text."""
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks of the sampler, of the end of its answer and of drafting."""

    max_tokens: int | None = _setting(None, "tokens to generate at most, or 0; default: what fits")
    min_tokens: int = _setting(0, "tokens before which nothing ends the answer")
    temperature: float = _setting(1.0, "0 takes the most likely token; higher is more varied")
    top_k: int = _setting(0, "choose among this many most likely tokens; 0 or -1: all")
    top_p: float = _setting(1.0, "choose among the fewest tokens that hold this share")
    min_p: float = _setting(0.0, "drop tokens below this share of the most likely one")
    repetition_penalty: float = _setting(1.0, "above 1: tokens of prompt and output less likely")
    presence_penalty: float = _setting(0.0, "taken off the logit of every token of the output")
    frequency_penalty: float = _setting(0.0, "taken off once per occurrence in the output")
    logit_bias: Mapping[int, float] | None = _setting(None, "added to logits, by token id")
    allowed_token_ids: tuple[int, ...] | None = _setting(None, "only these tokens are chosen")
    banned_token_ids: tuple[int, ...] | None = _setting(None, "these tokens are never chosen")
    stop: tuple[str, ...] = _setting((), "text that ends the answer")
    stop_token_ids: tuple[int, ...] = _setting((), "tokens that end the answer, besides EOS")
    ignore_eos: bool = _setting(False, "go on after the model's end token")
    include_stop_str_in_output: bool = _setting(False, "keep the stop text or token in the answer")
    n: int = _setting(1, "answers per prompt")
    seed: int | None = _setting(None, "same seed, same text; default: one is drawn and reported")
    logprobs: int | None = _setting(
        None, "log-probabilities, with this many alternatives; 0: of the chosen token only"
    )
    prompt_logprobs: int | None = _setting(
        None, "log-probabilities of the prompt's tokens, with this many alternatives"
    )
    logprobs_mode: LogprobsMode = _setting("raw", "raw (the model's own) or processed")
    detokenize: bool = _setting(True, "give the text, not only token ids")
    skip_special_tokens: bool = _setting(True, "leave special tokens out of the text")
    speculate: int | Literal["auto"] | None = _setting(
        None, "K, draft tokens per round; 0: none; default: the engine's"
    )
    acceptance: AcceptanceRule = _setting(
        "match", "match (text does not depend on K) or rejection (accepts a little more)"
    )
    draft_vocab: str | None = _setting(None, "draft vocabulary to use, by name")
    draft_from: DraftFrom = _setting(
        "auto", "where drafts come from: head, context (copied), or auto"
    )

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        # None stands for nothing, as in the requests of other servers.
        object.__setattr__(self, "stop", tuple(stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for name in ("allowed_token_ids", "banned_token_ids"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))
        check(self, _CHOICES)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def needs_history(self) -> bool:
        """Whether a choice depends on the tokens before it."""
        return self.has_penalties or self.min_tokens > 0

    @property
    def is_restricted(self) -> bool:
        """Whether some tokens are biased, or others are all that may be chosen."""
        lists = self.logit_bias, self.banned_token_ids
        return any(lists) or self.allowed_token_ids is not None

    @cached_property
    def restrictions(self) -> Restrictions:
        """The lists as arrays."""
        # numpy, which `--help` goes without
        from headstart.sampling.restrictions import Restrictions

        return Restrictions(
            self.logit_bias or {}, self.allowed_token_ids, self.banned_token_ids or ()
        )

    @property
    def is_plain_greedy(self) -> bool:
        """Greedy, and nothing (but a grammar, which is not ours) can change the arg-max."""
        return self.is_greedy and not self.needs_history and not self.is_restricted

    def check_token_ids(self, num_tokens: int) -> None:
        """ConfigError if an id is outside a vocabulary of `num_tokens`."""
        check_vocabulary(self, num_tokens)


MASK64 = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15  # odd, from the golden ratio: the step of splitmix64
PROMPT_GAMMA = 0xD1B54A32D192ED03  # another odd step, so that prompts and samples cannot meet


def mix64(word: int) -> int:
    """The finaliser of splitmix64: a bijection of 64-bit words in which every bit moves all."""
    word &= MASK64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK64
    return word ^ (word >> 31)


def derive_seed(seed: int, sample: int, prompt: int = 0) -> int:
    """The seed of one of n samples (and of one of many prompts): 64 bits, 0 or above.

    Sample 0 of prompt 0 keeps the request's seed, so the first of n answers is the answer of n=1.
    Derive once from both numbers; deriving twice would give (0, 1) and (1, 0) the same noise.
    """
    if sample == 0 and prompt == 0:
        return seed & MASK64
    return mix64(mix64(seed + prompt * PROMPT_GAMMA) + sample * GAMMA)


@dataclass(frozen=True, eq=False)
class Row:
    """One row of logits, by what the choice of its token depends on.

    `prompt_ids` and `output_ids` are read only when `params.has_penalties`.
    """

    params: SamplingParams
    seed: int  # of the sample: see derive_seed; 64 bits
    position: int  # absolute position of the token to be chosen
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()  # so far, including the drafts before this row
    num_output: int = 0  # how many tokens that is, for min_tokens
    end_ids: frozenset[int] = frozenset()  # EOS and stop ids, which min_tokens holds back
    mask: Tensor | None = None  # bool [V], the tokens that the grammar allows
    # prompt_ids and the first of output_ids, counted by the request; None: not counted yet
    history: History | None = None

    @property
    def is_held_back(self) -> bool:
        """Whether min_tokens still forbids the end tokens."""
        return self.num_output < self.params.min_tokens and bool(self.end_ids)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the choice is the arg-max of the logits as they are."""
        return self.mask is None and self.params.is_plain_greedy
