"""What passes begin with, against plain PyTorch; on the CPU interpreted."""

from __future__ import annotations

import pytest
import torch
from support.kernel_inputs import DEVICE, random
from torch.nn.functional import rms_norm

pytest.importorskip("triton")

from headstart.backends.cuda.kernels.inputs import embed_rows, newest_rows, noise_rows, pair_rows

WIDTH, EPS = 48, 1e-5


def test_embeddings_and_their_norm() -> None:
    embed, gain = random(10, WIDTH), random(WIDTH, seed=1)
    ids = torch.tensor([3, 9, 3], device=DEVICE)
    stream, normed = embed_rows(ids, embed, gain, EPS)
    assert torch.equal(stream, embed[ids])
    torch.testing.assert_close(normed, rms_norm(embed[ids], (WIDTH,), gain, EPS))
    stream.zero_()
    assert embed[3].any(), "the stream is a copy"


@pytest.mark.parametrize("embed_first", [True, False])
@pytest.mark.parametrize("zero_first", [True, False])
def test_pairs_stand_side_by_side(embed_first: bool, zero_first: bool) -> None:
    embed, gains = random(10, WIDTH), (random(WIDTH, seed=1), random(WIDTH, seed=2))
    # Parts of wider tensors, as a batch has them.
    ids = torch.arange(10, device=DEVICE).view(2, 5)[:, :3]
    states = random(2, 5, WIDTH, seed=3)[:, :3]
    positions = torch.tensor([0, 1, 2, 7, 8, 0], device=DEVICE)
    pair = pair_rows(
        ids, states, embed, gains, positions, EPS, embed_first=embed_first, zero_first=zero_first
    )
    tokens = embed[ids.flatten()]
    if zero_first:
        tokens = tokens.masked_fill((positions == 0)[:, None], 0)
    parts = [
        rms_norm(tokens, (WIDTH,), gains[0], EPS),
        rms_norm(states.reshape(6, WIDTH), (WIDTH,), gains[1], EPS),
    ]
    torch.testing.assert_close(pair, torch.cat(parts if embed_first else parts[::-1], 1))


def test_the_newest_pending_row_of_each_request() -> None:
    normed, recycled = random(6, WIDTH), random(6, WIDTH, seed=1)
    pending = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)  # the second index is free
    found = newest_rows(normed, recycled, pending)
    assert torch.equal(found[0], normed[[1, 3]])
    assert torch.equal(found[1], recycled[[1, 3]])


@pytest.mark.parametrize(("rows", "ahead"), [(1, 0), (1, 2), (3, 0)])
def test_noise_belongs_to_the_chosen_position(rows: int, ahead: int) -> None:
    lengths = torch.tensor([7, 20], dtype=torch.int32, device=DEVICE)
    inv_temps, seeds = random(2).abs(), torch.tensor([5, -9], device=DEVICE)
    hot, seeded, positions = noise_rows(lengths, inv_temps, seeds, rows, ahead)
    assert torch.equal(hot, inv_temps.repeat_interleave(rows))
    assert torch.equal(seeded, seeds.repeat_interleave(rows))
    assert positions.tolist() == [n + ahead + r for n in (7, 20) for r in range(rows)]
