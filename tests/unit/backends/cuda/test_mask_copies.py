"""Masks of a round on their way to the rows of a batch."""

from __future__ import annotations

import numpy as np
import torch

from headstart.backends.cuda.decode_batch import DecodeBatch
from headstart.backends.cuda.launched import LaunchedRound, WaitingRound
from headstart.backends.cuda.mask_copies import MaskCopies
from headstart.backends.cuda.shapes import RoundShape
from headstart.backends.rounds import RoundMasks

ROWS, WORDS = 3, 4  # of a request


def masks_in(copies: MaskCopies, words: int) -> RoundMasks:
    """Of requests 2 and 0: three masks of the first, one of the second."""
    room = copies.room(4, words)
    room[:] = np.arange(4 * words).reshape(4, words) + 1
    return RoundMasks(room, [2, 0, 2, 2], [0, 0, 1, 2], {2: 3, 0: 1})


def test_rows_get_their_masks_and_nothing_behind_the_last_word_is_allowed() -> None:
    for words in (WORDS, 2, WORDS):
        rows = torch.full((3 * ROWS, WORDS), -1, dtype=torch.int32)
        copies = MaskCopies(rows)
        masks = masks_in(copies, words)
        copies.copy(masks, ROWS, count=3)
        given = np.pad(masks.words, ((0, 0), (0, WORDS - words)))
        assert rows[[6, 0, 7, 8]].tolist() == given.tolist()
        others = rows[[1, 2, 3, 4, 5]]
        assert (others == -1).all(), "they have no mask, or no grammar"


def test_rounds_of_other_sizes_use_the_same_memory() -> None:
    copies = MaskCopies(torch.zeros(3 * ROWS, WORDS, dtype=torch.int32))
    first = copies.room(9, WORDS)
    assert np.shares_memory(first, copies.room(2, 3))
    assert copies.room(9, WORDS + 1).shape == (9, WORDS + 1)


def test_a_draft_that_fits_counts_only_where_a_mask_follows() -> None:
    """Of request 0 there is one mask: its first draft may fit it, or not, or be unknown to it."""
    launched = LaunchedRound([None] * 3, drafts=[2, 2, 2])
    masks = masks_in(MaskCopies(torch.zeros(9, WORDS, dtype=torch.int32)), 2)
    assert masks.words[1].tolist() == [3, 4] and masks.num_fitting(2) == 2
    for draft, short in ((1, {0: 0}), (2, {}), (34, {0: 0}), (64, {})):
        ids = torch.tensor([[5, draft, 9], [5, 6, 7], [5, 6, 7]])
        waiting = WaitingRound(
            launched, RoundShape.usual(3, 2), ids, torch.full_like(ids[:, 0], 2), None
        )
        assert waiting.cut_short(masks) == short


def test_drafts_are_as_many_as_the_device_made_where_it_decides() -> None:
    """A request that copies has as many as go on, which the host did not know."""
    ids = torch.tensor([[5, 34, 9, 9], [5, 6, 7, 8], [5, 6, 7, 8]])
    waiting = WaitingRound(
        LaunchedRound([None] * 3, drafts=[3, 3, 3]), RoundShape.usual(3, 3), ids,
        torch.tensor([0, 1, 3]), None,
    )  # fmt: skip
    assert waiting.drafts() == [[], [6], [6, 7, 8]]
    masks = masks_in(MaskCopies(torch.zeros(12, WORDS, dtype=torch.int32)), 2)
    assert waiting.cut_short(masks) == {}, "what fits the last mask of request 0 is no draft"


def test_a_grammar_cuts_drafts_that_a_pass_has_rows_for_and_brings_none_back() -> None:
    batch = DecodeBatch(
        3, max_drafts=4, window=5, max_blocks=1, hidden=1, vocab=8, dtype=torch.float32,
        device=torch.device("cpu"), copied=4,
    )  # fmt: skip
    batch.made[0] = torch.tensor([4, 2, 3])  # where request 1 wanted 4, too
    batch.cut_drafts({0: 3, 1: 3})
    assert batch.drafted.tolist() == [3, 2, 3]
