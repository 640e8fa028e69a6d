"""Rounds under way: what the host will read of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, repeat
from typing import Any

import torch
from torch import Tensor

from headstart.backends.cuda.shapes import RoundShape
from headstart.backends.rounds import Emitted, RoundMasks, RoundTiming
from headstart.backends.rows import TrunkOutput
from headstart.backends.scores import to_host
from headstart.sampling.choose import TokenLogprob
from headstart.sampling.masks import has_token

_NO_OTHERS: dict[int, float] = {}  # alternatives of tokens that nobody asked for; shared


def mark(device: torch.device) -> torch.cuda.Event | None:
    """A point in what the device has been given to do, with a time that it will know."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass
class LaunchedRound:
    """A result on its way to the host: per request a count, and so many tokens."""

    tops: list[int | None]  # alternatives that each request asks for, None: no log-probabilities
    drafts: list[int] = field(default_factory=list)  # of each request at most
    num_unread: int = 0
    shape: RoundShape | None = None  # of a round whose time counts,
    began: torch.cuda.Event | None = None  # and since when
    joined: TrunkOutput | None = None  # of rows that joined its trunk pass
    made: Tensor | None = None  # [2, B] drafts, and those of the head, where the device decides
    emitted: Tensor | None = None  # [B, 1 + R], when all has been launched
    logprobs: tuple[Tensor, Tensor] | None = None  # [B * R', ...], R' rows of each request
    done: torch.cuda.Event | None = None

    def copy_out(
        self, emitted: Tensor, logprobs: tuple[Tensor, Tensor] | None = None,
        made: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Begin to copy the outcome to the host, and mark when all of it will be there."""
        self.emitted = to_host(emitted)
        if logprobs is not None:
            self.logprobs = to_host(logprobs[0]), to_host(logprobs[1])
        if made is not None:
            self.made = to_host(made)
        self.done = mark(emitted.device)

    def collect(self) -> list[Emitted]:
        if self.emitted is None:  # a failed step left it before its choice
            return [Emitted([]) for _ in self.drafts]
        if self.done is not None:
            self.done.synchronize()
        tokens = [row[1 : 1 + row[0]] for row in self.emitted.tolist()]
        found = self._logprobs(tokens) if self.logprobs is not None else repeat(list[Any]())
        made = self.made.T.tolist() if self.made is not None else repeat((None, None))
        return [
            Emitted(own, list(more), *counts)
            for own, more, counts in zip(tokens, found, made, strict=False)
        ]

    def _logprobs(self, tokens: list[list[int]]) -> Iterator[list[TokenLogprob]]:
        """Of each request's tokens, where it asks for them."""
        assert self.logprobs is not None
        most = max(top or 0 for top in self.tops)
        if not most:
            chosen = self.logprobs[0][:, 0].tolist()
            each = len(chosen) // len(tokens)  # rows of a request
            for begin, own, top in zip(count(0, each), tokens, self.tops, strict=False):
                told = own if top is not None else ()
                yield list(
                    map(TokenLogprob, told, chosen[begin : begin + each], repeat(_NO_OTHERS))
                )
            return
        values = self.logprobs[0][:, : 1 + most].tolist()
        ids = self.logprobs[1][:, :most].tolist()
        each = len(values) // len(tokens)  # rows of a request
        for index, (own, top) in enumerate(zip(tokens, self.tops, strict=True)):
            found = []
            for row, token in enumerate(own if top is not None else (), index * each):
                best = dict(zip(ids[row][:top], values[row][1:], strict=False)) if top else {}
                found.append(TokenLogprob(token, values[row][0], best))
            yield found

    def timing(self) -> RoundTiming | None:
        if self.shape is None or self.began is None or self.done is None:
            return None
        seconds = float(self.began.elapsed_time(self.done)) / 1e3
        return RoundTiming(self.shape.count, self.shape.num_drafts, seconds)


@dataclass(frozen=True)
class WaitingRound:
    """A round whose choice waits for masks."""

    launched: LaunchedRound
    shape: RoundShape
    ids: Tensor  # [B, 1 + K] newest tokens and drafts,
    made: Tensor  # [B] and how many of them there are, on their way to the host
    drafted: torch.cuda.Event | None

    def drafts(self) -> list[list[int]]:
        """Those of each request, when they have arrived."""
        pairs = zip(self.ids.tolist(), self.made.tolist(), strict=True)
        return [row[1 : 1 + count] for row, count in pairs]

    def cut_short(self, masks: RoundMasks) -> dict[int, int]:
        """Drafts that count of requests, by index, whose masks end before a draft that fits.

        A grammar that takes long gives the first mask alone. A draft that the last mask forbids
        needs nothing: no choice equals it.
        """
        found, drafts = {}, self.drafts()
        for index, row in masks.ends.items():
            count = masks.depths[row]
            is_short = count < len(drafts[index])
            if is_short and has_token(masks.words[row], drafts[index][count]):
                found[index] = count
        return found
