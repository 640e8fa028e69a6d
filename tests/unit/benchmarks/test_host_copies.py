"""The stub on which rounds that copy are played does what the kernels do."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from host_copies import Made, fitting

from headstart.backends.cuda.kernels.squeezed import fit_drafts
from headstart.engine.options import MAX_DRAFTS


@pytest.mark.parametrize("seed", range(4))
def test_drafts_that_a_pass_has_no_rows_for_are_cut_as_the_kernel_does_it(seed: int) -> None:
    draw = random.Random(seed)
    made: list[Made] = [([1] * draw.choice([1, 3, 8, MAX_DRAFTS]), 1) for _ in range(5)]
    counts = [len(drafts) for drafts, _ in made]
    for rows in range(5, sum(counts) + 6):
        limits = torch.tensor(counts, dtype=torch.int32)
        many = torch.full_like(limits, 99)
        fit_drafts(many, many, limits, most=MAX_DRAFTS, rows=rows)
        assert [len(drafts) for drafts, _ in fitting(made, rows)] == limits.tolist()
