"""Device state of the requests that decode in rounds: fixed tensors, with one index for each.

A captured round reads and writes these tensors, so they are made once and only changed in place:
by kernels (`fill_`), since a copy of a number from the host would wait for the rounds under way.
The host keeps no copy of what the device decides; it learns the emitted tokens one round later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headstart.backends.cuda.kernels.adjusting import REJECTS, USES, Settings
from headstart.backends.cuda.kernels.copies import COUNT, TOKENS
from headstart.backends.cuda.kernels.logprobs import MAX_LOGPROBS
from headstart.backends.cuda.kernels.own_rows import OwnSlots
from headstart.backends.cuda.packed import PackedRows
from headstart.backends.cuda.recurrent import RecurrentBatch
from headstart.backends.cuda.sampling import empty_settings, move_row, set_row
from headstart.backends.rounds import GivenCopy, RoundRequest, RoundSizes
from headstart.backends.rows import on_device
from headstart.models.config import ModelConfig
from headstart.models.recurrence import LayerStates
from headstart.sampling.masks import num_words
from headstart.vocab.own_tokens import OwnTokens

WINDOW = 16  # tokens that the head may be behind while no request drafts
_LEAST_ROWS = 64  # that a round may have in any case


def most_rows(sizes: RoundSizes) -> int:
    """Rows of a round that memory is planned for, and a few more of a small engine."""
    return max(sizes.max_requests * (sizes.num_drafts + 1), _LEAST_ROWS)


class DecodeBatch:
    """Room for `count` requests, of each up to `window` tokens that the head has not read."""

    def __init__(
        self, count: int, *, max_drafts: int, window: int, max_blocks: int, hidden: int, vocab: int,
        dtype: torch.dtype, device: torch.device, recurrent: RecurrentBatch | None = None,
        modules: int = 1, packed: PackedRows | None = None, copied: int = 0, own: int = 0,
    ):  # fmt: skip
        assert window > max_drafts

        def numbers(kind: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(count, *shape, dtype=kind, device=device)

        self.max_drafts = max_drafts
        self.lengths = numbers(torch.int32)
        self.left = numbers(torch.int32)
        self.limits = numbers(torch.int32)
        self.pending = numbers(torch.int32)
        self.vocabs = numbers(torch.int32)  # draft vocabularies, by number
        self.own = OwnSlots.empty(count, own, device) if own else None
        # Drafts that a round has of each request, and those of the head among them: what the host
        # allows, or where drafts may be copied what the device makes of that.
        self.copies: Tensor | None = None
        self.made = self.limits.expand(2, -1)
        if copied:
            self.copies = numbers(torch.int64, TOKENS + 2 * (copied + 1))
            self.made = torch.zeros(2, count, dtype=torch.int32, device=device)
        self.settings = empty_settings(count, vocab, device)
        self.tokens = numbers(torch.int64, window)
        self.states = numbers(dtype, window, hidden)
        # What each module but the last gave for the token before those.
        self.carried = numbers(dtype, max(0, modules - 1), hidden)
        self.tables = numbers(torch.int32, max_blocks)
        self.emitted = numbers(torch.int64, max_drafts + 2)
        # What a part of a round leaves for the next: tokens, and states of all rows.
        self.ids = numbers(torch.int64, max_drafts + 1)
        self.normed = numbers(dtype, max_drafts + 1, hidden).flatten(0, 1)
        self.stream = numbers(dtype, max_drafts + 1, hidden).flatten(0, 1)
        self.draft_normed = numbers(dtype, max(1, max_drafts), hidden)
        self.draft_shares = numbers(torch.float32, max(1, max_drafts))
        self.masks = numbers(torch.int32, max_drafts + 1, num_words(vocab)).flatten(0, 1)
        self.logprobs = numbers(torch.float32, max_drafts + 1, 1 + MAX_LOGPROBS).flatten(0, 1)
        self.logprob_ids = numbers(torch.int32, max_drafts + 1, MAX_LOGPROBS).flatten(0, 1)
        self._packed = packed
        self.recurrent = recurrent
        self._buffers = list(range(count))  # as `recurrent` has them

    @classmethod
    def for_rounds(
        cls, sizes: RoundSizes, config: ModelConfig, *, window: int, block_size: int,
        dtype: torch.dtype, device: torch.device, recurrent: RecurrentBatch | None = None,
        modules: int = 1, packs: bool = False,
    ) -> DecodeBatch:  # fmt: skip
        """Room for what rounds are made for; on the meta device nothing is taken.

        `packs`: whether rows of prompts join their trunk passes.
        """
        # A round under way and the next one may add tokens before the host knows of an end.
        max_tokens = sizes.max_tokens + 2 * sizes.max_drafts + 2
        max_blocks = -(-max_tokens // block_size)
        packed = None
        if packs:
            packed = PackedRows(
                most_rows(sizes), places=sizes.max_requests * (sizes.max_drafts + 1),
                max_blocks=max_blocks, hidden=config.hidden, width=config.attended, dtype=dtype,
                device=device,
            )  # fmt: skip
        return cls(
            sizes.max_requests, max_drafts=sizes.max_drafts,
            window=max(window, sizes.max_drafts + 1), max_blocks=max_blocks,
            hidden=config.hidden, vocab=config.vocab, dtype=dtype, device=device,
            recurrent=recurrent, modules=modules, packed=packed, copied=sizes.copied,
            own=sizes.own,
        )  # fmt: skip

    @property
    def drafted(self) -> Tensor:
        """[B] drafts of each request in the round under way."""
        return self.made[0]

    @property
    def packed(self) -> PackedRows:
        """Of passes that rows of prompts join, where they do."""
        assert self._packed is not None, "a batch that was made for such passes"
        return self._packed

    @property
    def num_bytes(self) -> int:
        """Of all tensors but those of packed passes and of recurrent layers."""
        named = {name: value for name, value in vars(self).items() if name != "made"}
        own = [*named.values(), *vars(self.settings).values()]
        if self.copies is not None:  # else it is a view of `limits`
            own.append(self.made)
        slots = 0 if self.own is None else self.own.num_bytes
        return slots + sum(value.nbytes for value in own if isinstance(value, Tensor))

    @property
    def window(self) -> int:
        return self.tokens.shape[1]

    @property
    def count(self) -> int:
        return self.lengths.shape[0]

    def of_vocab(self, settings: Settings, number: int) -> Settings:
        """The same, in which only requests with this draft vocabulary reject."""
        return self.only(settings, self.vocabs[: settings.count] == number)

    def only(self, settings: Settings, is_own: Tensor) -> Settings:
        """The same, in which only these requests [B] reject."""
        uses = settings.counts[USES]
        counts = settings.counts.clone(memory_format=torch.contiguous_format)
        counts[USES] = torch.where(is_own, uses, uses & ~REJECTS)
        numbers = settings.numbers.contiguous()  # with the same stride
        return replace(settings, numbers=numbers, counts=counts)

    def admit(
        self, index: int, request: RoundRequest, states: list[LayerStates] | None = None, *,
        vocab: int = 0,
    ) -> None:  # fmt: skip
        """Fill an index. Ordered after the rounds already launched, like every change below.

        states: of the recurrent layers, which hold the request's; vocab: its draft vocabulary.
        """
        self.vocabs[index].fill_(vocab)
        set_row(self.settings, index, request.row, request.newest, has_grammar=request.has_grammar)
        self.tokens[index, 0].fill_(request.newest)
        if request.states is not None:
            self.states[index, 0] = request.states[0]
            self.carried[index] = request.states[1:]
        if self.own is not None:
            self._admit_own(self.own, index, request.own)
        self.extend({index: (0, request.blocks)})
        if self.recurrent is not None:
            rows = request.num_tokens - 1  # the newest token has not been read
            self.recurrent.admit(
                index, request.state_slot, self._buffers[index], rows, states or []
            )
        # Last, so that the index stays free if there was no memory for one of these steps. Without
        # a head the newest tokens count as pending where copies are compared with them.
        num_pending = int(request.states is not None or self.copies is not None)
        self._set(index, [request.num_tokens, request.remaining, 0, num_pending])

    def _admit_own(self, slots: OwnSlots, index: int, own: OwnTokens | None) -> None:
        count = 0 if own is None else len(own.ids)
        if own is not None and count:
            given = on_device([*own.ids, *own.last], slots.ids.device, torch.int32)
            slots.ids[index, :count], slots.last[index, :count] = given[:count], given[count:]
        slots.counts[index].fill_(count)

    def remove(self, index: int) -> None:
        if self.own is not None:
            self.own.counts[index].zero_()
        if self.copies is not None:
            self.copies[index].zero_()
        self._set(index, [0, 0, 0, 0])

    def extend(self, blocks: Mapping[int, tuple[int, Sequence[int]]]) -> None:
        """More blocks of requests, by index: from which entry of its table on, and the blocks.

        In one copy: each costs the host more than what it holds.
        """
        indices = [index for index, (_, own) in blocks.items() for _ in own]
        entries = [start + i for start, own in blocks.values() for i in range(len(own))]
        values = [block for _, own in blocks.values() for block in own]
        new = on_device([*indices, *entries, *values], self.tables.device).view(3, -1)
        self.tables[new[0], new[1]] = new[2].int()

    def give(self, copies: Mapping[int, GivenCopy]) -> None:
        """What requests may copy, by index, and no others."""
        assert self.copies is not None, "a batch that was made for copies"
        self.copies[:, COUNT].zero_()
        if not copies:
            return
        width = self.copies.shape[1] - TOKENS
        rows = [
            [one.start, min(len(one.tokens), width), int(one.confirmed), *one.tokens[:width],
             *[0] * (width - len(one.tokens))]
            for one in copies.values()
        ]  # fmt: skip
        flat = [*copies, *(value for row in rows for value in row)]
        given = on_device(flat, self.copies.device)
        self.copies[given[: len(rows)]] = given[len(rows) :].view(len(rows), -1)

    def limit(self, drafts: Sequence[int]) -> None:
        """Drafts per round of the first requests."""
        self.limits[: len(drafts)] = on_device(drafts, self.limits.device, torch.int32)

    def cut_drafts(self, drafts: Mapping[int, int]) -> None:
        """Drafts of some requests, by index, that count in the round under way at most."""
        given = on_device([*drafts, *drafts.values()], self.limits.device).view(2, -1)
        self.drafted[given[0]] = self.drafted[given[0]].minimum(given[1].int())

    def move(self, source: int, target: int) -> None:
        """A request changes its index, so that a smaller captured round serves those left."""
        for tensor in (
            self.lengths, self.left, self.limits, self.pending, self.vocabs, self.tokens,
            self.states, self.carried, self.tables,
        ):  # fmt: skip
            tensor[target] = tensor[source]
        if self.copies is not None:
            self.copies[target] = self.copies[source]
        if self.own is not None:
            self.own.move(source, target)
        move_row(self.settings, source, target)
        if self.recurrent is not None:
            own = self._buffers
            own[source], own[target] = own[target], own[source]  # each has one
            self.recurrent.move(source, target, own)
        self.remove(source)

    def _set(self, index: int, numbers: list[int]) -> None:
        for tensor, number in zip(
            (self.lengths, self.left, self.limits, self.pending), numbers, strict=True
        ):
            tensor[index].fill_(number)
