"""Rounds of a gated delta net against the plain module, row by row; on the CPU interpreted."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from headstart.backends.cuda.decode_batch import DecodeBatch
from headstart.backends.cuda.forward import Kernels
from headstart.backends.cuda.recurrent import RecurrentBatch, round_recur, settle
from headstart.backends.rounds import RoundRequest
from headstart.models.delta_config import DeltaConfig
from headstart.models.linear_attention import DeltaNet
from headstart.models.recurrence import LayerStates, SlotRecurrence, StateSpan, empty_states
from headstart.sampling.params import Row, SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = DeltaConfig(k_heads=1, v_heads=2, k_dim=16, v_dim=12, kernel=4)
HIDDEN, DRAFTS = 32, 2


def make_net(gate: Literal["silu", "sigmoid"] = "silu") -> DeltaNet:
    torch.manual_seed(0)
    net = DeltaNet(HIDDEN, replace(CONFIG, gate=gate), 1e-6)
    for value in net.parameters():
        value.data.normal_(0, 0.3)
    return net.to(DEVICE)


def plain(net: DeltaNet, texts: list[Tensor]) -> tuple[list[Tensor], LayerStates]:
    """Every text from its beginning: what its rows give, and the states after them by slot."""
    states, results = empty_states(CONFIG, len(texts), torch.float32, DEVICE), []
    for slot, text in enumerate(texts):
        span = StateSpan(0, len(text), None, ((len(text), slot),))
        results.append(net(text, None, SlotRecurrence(states, [span], one_by_one=True)))
    return results, states


def request(num_read: int, *, state_slot: int) -> RoundRequest:
    return RoundRequest(
        num_tokens=num_read + 1, remaining=9, newest=torch.tensor(0, device=DEVICE), states=None,
        row=Row(SamplingParams(temperature=0), 0, num_read + 1), blocks=[0],
        state_slot=state_slot,
    )  # fmt: skip


class Play:
    """Two texts that were read up to some row, admitted in the wrong order."""

    def __init__(self, read: list[int], gate: Literal["silu", "sigmoid"] = "silu"):
        self.net = make_net(gate)
        self.texts = [torch.randn(count, HIDDEN, device=DEVICE) for count in read]
        self.states = [plain(self.net, self.texts)[1]]
        recurrent = RecurrentBatch.create(CONFIG, 1, 3, DRAFTS, torch.float32, DEVICE)
        self.batch = DecodeBatch(
            3, max_drafts=DRAFTS, window=4, max_blocks=1, hidden=4, vocab=8, dtype=torch.float32,
            device=DEVICE, recurrent=recurrent,
        )  # fmt: skip
        self.recurrent = recurrent
        self.order = [1, 0]
        for at, text in enumerate(self.order):
            self.batch.admit(at, request(read[text], state_slot=text), self.states)

    def settle(self) -> None:
        lengths = [len(self.texts[text]) + 1 for text in self.order]
        settle([self.net], self.recurrent, self.states, lengths)

    def round(self, rows: int, accepted: list[int], given: Tensor | None = None) -> None:
        """New rows of each text, some of which are accepted; held against the plain module."""
        new = torch.randn(len(self.order), rows, HIDDEN, device=DEVICE) if given is None else given
        first = [len(self.texts[text]) for text in self.order]
        begin = torch.tensor([*first, -1], dtype=torch.int32, device=DEVICE)
        recur = round_recur(Kernels(), self.recurrent, self.states, begin, rows)
        x = torch.cat([new.flatten(0, 1), torch.full((rows, HIDDEN), torch.nan, device=DEVICE)])
        found = recur(self.net, 0, x).sum(0).view(3, rows, HIDDEN)
        for at, text in enumerate(self.order):
            whole = torch.cat([self.texts[text], new[at]])
            wanted = plain(self.net, [whole])[0][0][-rows:]
            torch.testing.assert_close(found[at], wanted, rtol=1e-4, atol=1e-5)
            self.texts[text] = whole[: len(whole) - rows + accepted[at]]
        assert not found[2].any(), "a free index gives nothing"
        counts = torch.tensor(accepted, dtype=torch.int32, device=DEVICE)
        self.recurrent.replays[: len(accepted)] = counts


def test_rejected_rows_leave_no_trace() -> None:
    play = Play([5, 2], gate="sigmoid")
    play.round(3, [1, 3])
    play.round(3, [2, 1])
    play.round(1, [1, 1])
    play.round(3, [3, 2])
    play.settle()
    wanted = plain(play.net, play.texts)[1]
    torch.testing.assert_close(play.states[0].memory, wanted.memory, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(play.states[0].conv, wanted.conv, rtol=1e-5, atol=1e-6)
    assert not play.recurrent.replays.any()
    play.round(2, [1, 1])  # and on from there, as if nothing had been


def test_states_have_the_bits_of_rounds_without_drafts() -> None:
    drafted, alone = Play([5, 2]), Play([5, 2])
    read = [len(text) for text in drafted.texts]
    drafted.round(3, [2, 3])
    drafted.round(3, [1, 0])
    for step in range(3):
        rows = torch.stack([drafted.texts[text][read[text] + step] for text in alone.order])
        alone.round(1, [1, 1], rows[:, None])
    for play in (drafted, alone):
        play.settle()
    assert torch.equal(drafted.states[0].memory, alone.states[0].memory)
    assert torch.equal(drafted.states[0].conv, alone.states[0].conv)


def test_a_request_that_changes_its_index_takes_its_rows_along() -> None:
    play = Play([4, 1])
    play.round(3, [3, 2])
    play.batch.move(1, 0)  # text 0 goes on, text 1 has left, another one comes
    play.texts[1] = torch.randn(2, HIDDEN, device=DEVICE)
    fresh = plain(play.net, play.texts)[1]
    play.states[0].memory[1], play.states[0].conv[1] = fresh.memory[1], fresh.conv[1]
    play.batch.admit(1, request(2, state_slot=1), play.states)
    play.order = [0, 1]
    play.round(3, [2, 1])
    play.round(2, [1, 2])
    play.settle()  # rounds compare what they give; and the states are those of both texts
    wanted = plain(play.net, play.texts)[1]
    torch.testing.assert_close(play.states[0].memory, wanted.memory, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("drafts", [0, 2, 16])
def test_bytes_are_known_before_anything_is_taken(drafts: int) -> None:
    made = [
        RecurrentBatch.create(CONFIG, 2, 3, drafts, torch.bfloat16, torch.device(device))
        for device in ("meta", "cpu")
    ]
    places = max(2 * (drafts + 1), drafts + 1 + 3)
    each = places * (2 * 2 * CONFIG.channels + 4 * 2 * CONFIG.v_heads)  # inputs, mixed; gates
    assert [batch.num_bytes for batch in made] == [2 * 3 * each + 3 * 3 * 4] * 2
    tensors = [t for ring in made[1].rings for t in (ring.inputs, ring.mixed, ring.gates)]
    stored = sum(t.untyped_storage().nbytes() for t in tensors)
    assert stored == made[1].num_bytes - 3 * 3 * 4
