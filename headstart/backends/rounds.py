"""Decoding rounds that a backend runs by itself, ahead of the host.

A round drafts, verifies, chooses and accepts for all its requests without the host, which only
gives masks where a request has a grammar. The host launches one round, and reads what the one
before gave while the device works. Requests have indices from 0 without gaps: when one leaves, the
last takes its index.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from headstart.backends.rows import TrunkOutput, TrunkRows
from headstart.sampling.choose import TokenLogprob
from headstart.sampling.params import Row, SamplingParams
from headstart.vocab.own_tokens import OwnTokens


@dataclass(frozen=True, kw_only=True)
class RoundSizes:
    """What rounds are made for."""

    max_requests: int
    max_drafts: int  # of a request in a round
    num_drafts: int  # of a usual round, where there is no menu
    max_tokens: int  # of a request: the model's length, or what K/V memory holds
    max_rows: int = 1  # of a pass over prompts
    draft_vocab: str | None = None  # what most requests' drafts are among; None: all tokens
    copied: int = 0  # drafts of a round that may be copied from a request's context; 0: none
    own: int = 0  # tokens of its text that a request drafts beside its vocabulary at most
    menu: tuple[int, ...] = ()  # numbers of drafts that others are rounded up to; none: any


@dataclass(frozen=True, kw_only=True)
class RoundRequest:
    """What a request brings into rounds: it has been read up to its newest token."""

    num_tokens: int
    remaining: int  # tokens it may still get
    newest: Tensor  # the newest token, which only the device knows yet
    states: Tensor | None  # [modules, hidden] what each module of the head is fed with beside it
    row: Row  # what the choice after it depends on; its outputs do not have the newest token
    blocks: Sequence[int]
    has_grammar: bool = False
    draft_vocab: str | None = None  # what its drafts are among; None: all tokens
    own: OwnTokens | None = None  # of its text without the newest, beside that vocabulary
    state_slot: int = -1  # of its recurrent states, where the model has any


@dataclass(frozen=True)
class GivenCopy:
    """Tokens that would follow a text that copies, from place `start` on.

    `confirmed`: only where the head's own drafts agree with them.
    """

    start: int
    tokens: Sequence[int]
    confirmed: bool = False


@dataclass(frozen=True)
class HeadStates:
    """What a head goes on with: states of tokens that it has not read, and what they follow."""

    pending: Tensor  # [n, hidden] for the first module
    carried: Tensor  # [modules - 1, hidden] that the first of these tokens feeds the others with


@dataclass(frozen=True)
class RoundTiming:
    """How long a whole round took, of a kind whose time says what such rounds cost."""

    size: int  # requests that the captured round has room for
    num_drafts: int
    seconds: float


@dataclass(frozen=True)
class Emitted:
    """What a round gave one request; log-probabilities where it asked for them."""

    tokens: list[int]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_drafts: int | None = None  # where the device decided how many there are,
    num_of_head: int | None = None  # and how many of these are the head's


class Launched(Protocol):
    """Tokens on their way to the host."""

    @property
    def drafts(self) -> Sequence[int]:
        """Drafts of each request at most, by index."""
        ...

    @property
    def joined(self) -> TrunkOutput | None:
        """Of rows that joined its trunk pass, as a pass of their own would give it."""
        ...

    @property
    def num_unread(self) -> int:
        """Tokens from before the round that the head has not read yet, at most."""
        ...

    def collect(self) -> list[Emitted]:
        """The tokens of each request, waiting for them."""
        ...

    def timing(self) -> RoundTiming | None:
        """After `collect`: what the round took, if that is worth knowing."""
        ...


@dataclass(frozen=True)
class SizeTimes:
    """Seconds of rounds with so many requests, measured with blank ones."""

    size: int
    seconds: dict[int, float]  # by number of drafts, extrapolated to empty contexts
    per_token: dict[int, float]  # seconds more for each token of context, all requests together
    catch_up: float  # that a full window of tokens adds for the head


@dataclass(frozen=True)
class RoundMasks:
    """What may come next in a round: bits of tokens, the lowest of 32 in a word first."""

    # int32 [rows, words], the beginning of `DeviceRounds.mask_room`. Tokens that they have no bits
    # for are not allowed.
    words: np.ndarray
    requests: Sequence[int]  # of each row, by index,
    depths: Sequence[int]  # and how many of its drafts come before
    ends: Mapping[int, int]  # the last row of each request that has a grammar, by its index

    def num_fitting(self, index: int) -> int:
        """Drafts of a request that have a mask behind them."""
        return self.depths[self.ends[index]]


class DeviceRounds(ABC):
    """All requests of one engine that decode in rounds."""

    sizes: RoundSizes
    window: int  # tokens that the head may be behind while no request drafts

    @abstractmethod
    def why_not(self, params: SamplingParams) -> str | None:
        """What keeps a request with these settings out of rounds, or None."""

    @abstractmethod
    def choose_first(self, logits: Tensor, rows: Sequence[Row]) -> tuple[list[Tensor], Launched]:
        """First tokens of requests that will be admitted; the host need not wait for them."""

    @abstractmethod
    def admit(self, request: RoundRequest) -> None:
        """Let a request take part, with the next index."""

    @abstractmethod
    def remove(self, index: int) -> None:
        """Let a request leave."""

    @abstractmethod
    def extend(self, blocks: Mapping[int, tuple[int, Sequence[int]]]) -> None:
        """More K/V blocks of requests, by index: from which entry of a table on, and the blocks."""

    @abstractmethod
    def max_ahead(self, drafts: Sequence[int]) -> int:
        """Tokens that the round under way and the next one, with these drafts, may add."""

    @abstractmethod
    def joins(self, rows: Sequence[TrunkRows]) -> bool:
        """Whether `launch` takes these rows of other requests into its trunk pass."""

    @abstractmethod
    def fitting_rows(self, counts: Sequence[int]) -> int:
        """How many rows, of requests with so many each, the next round takes best.

        Where many requests decode some sizes of a pass cost less for each row than others; what is
        left joins the round after it.
        """

    @abstractmethod
    def give(self, copies: Mapping[int, GivenCopy], most: int, rows: int) -> None:
        """What requests may copy in the next round, up to `most` tokens; others copy nothing.

        Where `sizes.copied`. The round goes on with tokens that fit what came since. `rows` are
        those of all requests beyond the head's drafts: where copies go on that would need more, and
        requests may have different numbers of rows, all that copy have fewer.
        """

    @abstractmethod
    def launch(self, drafts: Sequence[int], rows: Sequence[TrunkRows] = ()) -> Launched:
        """Start a round with so many drafts for each request at most; by index.

        `rows` of other requests, such as prompts, join its trunk pass: weights are read once.
        Where a request has a grammar the round waits for `choose` before its last part; meanwhile
        the device is busy with drafts and trunk.
        """

    @abstractmethod
    def read(self, rows: Sequence[TrunkRows]) -> TrunkOutput:
        """A trunk pass over such rows where no request decodes, as `joins` allows them."""

    @abstractmethod
    def is_drafting(self) -> bool:
        """Whether a round that will wait for masks has no drafts yet: the host has time left."""

    @abstractmethod
    def drafted(self) -> list[list[int]] | None:
        """The drafts of each request, waiting for them, if the round waits for masks."""

    @abstractmethod
    def mask_room(self, rows: int, words: int) -> np.ndarray:
        """Where masks for the next `choose` are written: int32 [rows, words]."""

    @abstractmethod
    def choose(self, masks: RoundMasks) -> None:
        """Go on with a round that waits.

        Rows of a request that have no mask are after a draft that does not fit, or does not count.
        """

    @abstractmethod
    def drain(self, lengths: Sequence[int]) -> list[HeadStates | None]:
        """All requests leave, when no round is under way; `lengths` are their tokens.

        What their heads go on with; recurrent states are brought up to date.
        """

    @abstractmethod
    def warm_up(self) -> None:
        """Compile and capture before the first request, while K/V memory is scratch."""

    @abstractmethod
    def time_rounds(self) -> list[SizeTimes]:
        """Time rounds of every number of drafts on the menu, before the first request."""

    @abstractmethod
    def time_passes(self) -> tuple[tuple[int, float], ...]:
        """Seconds of trunk passes by rows, where requests may differ in theirs; else empty."""

    @abstractmethod
    def bucket(self, count: int) -> int:
        """How many requests the captured round for `count` of them has room for."""
