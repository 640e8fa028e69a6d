"""The kernels of tokens beside a draft vocabulary, against the rule and the sampler."""

from __future__ import annotations

import random as draws

import pytest
import torch
from support.kernel_inputs import DEVICE, random

pytest.importorskip("triton")

from headstart.backends.cuda.kernels.own_rows import (
    OwnSlots,
    add_own,
    choose_with_own,
    own_logits,
)
from headstart.backends.cuda.round_model import DraftTokens
from headstart.sampling import noise
from headstart.vocab.own_tokens import OwnRule

VOCAB = 40


def columns_of(listed: list[int]) -> torch.Tensor:
    columns = DraftTokens.of([], torch.tensor(sorted(listed), device=DEVICE), VOCAB).columns
    assert columns is not None
    return columns


@pytest.mark.parametrize("limit", [1, 3, 5, 16])
def test_slots_on_the_device_are_those_of_the_rule(limit: int) -> None:
    """Two lists in one batch, texts that grow by other numbers of tokens, one that is not there."""
    draw = draws.Random(limit)
    lists = [draw.sample(range(VOCAB), 12) for _ in range(2)]
    rules = [OwnRule.of(listed, VOCAB, limit) for listed in lists]
    vocabs = torch.tensor([0, 1, 0, 1], dtype=torch.int32, device=DEVICE)
    slots = OwnSlots.empty(4, limit, DEVICE)
    texts: list[list[int]] = [[], [], [], []]
    wanted = [rules[number].start() for number in vocabs.tolist()]
    for _ in range(8):
        new = [[draw.randrange(VOCAB) for _ in range(draw.randrange(4))] for _ in texts[:3]] + [[]]
        for text, added in zip(texts, new, strict=True):
            text += added
        tokens = torch.tensor([[*own, *[0] * (4 - len(own))] for own in new], device=DEVICE)
        pending, lengths = (
            torch.tensor([len(own) for own in each], dtype=torch.int32, device=DEVICE)
            for each in (new, texts)
        )
        for number, listed in enumerate(lists):
            add_own(slots, tokens, pending, lengths, columns_of(listed), vocabs, number)
        for index, (own, text) in enumerate(zip(wanted, texts, strict=True)):
            own.read(text)
            count = int(slots.counts[index])
            assert slots.ids[index, :count].tolist() == own.ids
            assert slots.last[index, :count].tolist() == own.last
    assert max(len(own.ids) for own in wanted) == min(limit, 8)
    slots.move(1, 0)
    assert slots.ids[0].tolist() == slots.ids[1].tolist()
    assert slots.first(1).counts.tolist() == [len(wanted[1].ids)]


def some_slots(limit: int) -> OwnSlots:
    """Of four requests: none, one, some that end inside a tile, all."""
    slots = OwnSlots.empty(4, limit, DEVICE)
    slots.ids[:] = torch.stack([torch.randperm(VOCAB, device=DEVICE)[:limit] for _ in range(4)])
    slots.counts[:] = torch.tensor([0, 1, limit - 3, limit])
    return slots


@pytest.mark.parametrize("inputs", [64, 600])
def test_the_choice_is_the_best_of_what_the_list_gave_and_the_own_tokens(inputs: int) -> None:
    torch.manual_seed(inputs)
    limit, slots = 19, some_slots(19)
    x, weight = random(4, inputs), random(VOCAB, inputs)
    chosen = torch.tensor([[9, 3], [5, 3], [0, 3], [7, 3]], device=DEVICE)[:, 0]
    seeds, positions = [11, -12, 1 << 62, 14], [3, 5, 8, 13]
    where = torch.tensor(seeds, device=DEVICE), torch.tensor(positions, device=DEVICE)
    for temperature in (0.0, 0.7, 30.0):
        inv_temps = torch.full((4,), 1 / temperature if temperature else 0.0, device=DEVICE)
        found = choose_with_own(x, weight, slots, chosen, inv_temps, *where)
        sums = x @ weight.T
        if temperature:
            sums = sums / temperature + noise.gumbel(
                seeds, positions, torch.arange(VOCAB, device=DEVICE)
            )
        for row, count in enumerate(slots.counts.tolist()):
            among = [int(chosen[row]), *slots.ids[row, :count].tolist()]
            assert int(found[row]) == among[int(sums[row, among].argmax())]
    logits = own_logits(x, weight, slots)
    for row, count in enumerate(slots.counts.tolist()):
        own = slots.ids[row].long()
        torch.testing.assert_close(logits[row, :count], (x @ weight.T)[row, own[:count]])
        assert (logits[row, count:] == -torch.inf).all() and logits.shape == (4, limit)


def test_own_columns_come_behind_those_of_the_list() -> None:
    listed = [1, 4, 9, 30]
    tokens = DraftTokens.of([], torch.tensor(listed, device=DEVICE), VOCAB)
    slots = OwnSlots.empty(2, 3, DEVICE)
    slots.ids[:] = torch.tensor([[7, 2, 0], [39, 0, 0]])
    slots.counts[:] = torch.tensor([2, 1])
    found = tokens.columns_with(slots)
    assert found is not None and found.shape == (2, VOCAB)
    for row, own in enumerate(([7, 2], [39])):
        wanted = {token: at for at, token in enumerate([*listed, *own])}
        assert found[row].tolist() == [wanted.get(token, -1) for token in range(VOCAB)]
    assert tokens.columns_with(None) is tokens.columns
