"""Shapes of rounds: what makes one round a different program than another."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.backends.cuda.sampling import PLAIN, SamplingNeeds


@dataclass(frozen=True)
class DraftShape:
    """What makes the drafts of one round a different program than those of another."""

    count: int  # of requests, from the first
    num_drafts: int  # at most, per request
    head_rows: int  # pending tokens that the head reads; 0, only without drafts: none
    is_processed: bool = False  # whether a request's drafts are not simply the best of all tokens
    rejects: bool = False  # whether a request accepts by the rejection rule
    vocabs: tuple[int, ...] = (0,)  # draft vocabularies of the requests, by number
    columns: int = 0  # drafts of a request, where more may be copied than the head makes


@dataclass(frozen=True)
class TrunkShape:
    """What makes the trunk pass of one round a different program than that of another."""

    count: int
    num_drafts: int
    groups: int = 0  # that other rows, such as prompts', attend in; 0: a pass without such rows
    # Of a packed pass, all together; without groups: of requests with as many as each has drafts.
    # 0: as many of each request.
    rows: int = 0


@dataclass(frozen=True)
class ChoiceShape:
    """What makes the choices of one round, and their acceptance, a different program."""

    count: int
    num_drafts: int
    has_read: bool  # whether the head has read what was pending
    is_processed: bool = False  # whether a choice is not simply the best of all tokens
    has_logprobs: bool = False
    has_masks: bool = False
    rejects: bool = False
    # Draft vocabularies of the requests, where one rejects and the head drafts.
    vocabs: tuple[int, ...] = ()
    packed: int = 0  # rows, where each request has as many as it has drafts; 0: all as many


@dataclass(frozen=True)
class RoundShape:
    """What makes one round a different program than another: the shapes of its three parts."""

    count: int
    num_drafts: int
    head_rows: int
    needs: SamplingNeeds = PLAIN
    num_copied: int = 0  # drafts beyond those of the head, for requests that copy
    packed: int = 0  # rows of the trunk's pass, where only requests that copy have rows for them

    @classmethod
    def usual(cls, count: int, num_drafts: int) -> RoundShape:
        """The head reads what the round before may have left."""
        return cls(count, num_drafts, num_drafts + 1 if num_drafts else 0)

    @property
    def drafts(self) -> DraftShape:
        needs = self.needs if self.num_drafts else PLAIN
        return DraftShape(
            self.count, self.num_drafts, self.head_rows, is_processed=needs.processes_drafts,
            rejects=needs.rejects, vocabs=needs.vocabs if self.num_drafts else (),
            columns=self.num_rows - 1,
        )  # fmt: skip

    @property
    def num_rows(self) -> int:
        """Rows of a request in the trunk's pass, at most."""
        return 1 + self.num_drafts + self.num_copied

    @property
    def trunk(self) -> TrunkShape:
        return TrunkShape(self.count, self.num_rows - 1, rows=self.packed)

    @property
    def choice(self) -> ChoiceShape:
        needs = self.needs
        rejects = needs.rejects and self.num_rows > 1
        return ChoiceShape(
            self.count, self.num_rows - 1, has_read=self.head_rows > 0,
            is_processed=needs.processes, has_logprobs=needs.has_logprobs,
            has_masks=needs.has_masks, rejects=rejects,
            vocabs=needs.vocabs if rejects and self.num_drafts else (),
            packed=0 if needs.processes or needs.has_logprobs else self.packed,
        )  # fmt: skip
