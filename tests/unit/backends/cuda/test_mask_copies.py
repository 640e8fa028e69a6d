"""Masks of a round on their way to the rows of a batch."""

from __future__ import annotations

import numpy as np
import torch

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
        waiting = WaitingRound(launched, RoundShape.usual(3, 2), ids, None)
        assert waiting.cut_short(masks) == short
