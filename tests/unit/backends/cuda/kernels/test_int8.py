"""Products with int8 weights against plain PyTorch over the same rounded weights."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.kernel_inputs import DEVICE, layer_of, random
from torch import Tensor

pytest.importorskip("triton")

from headstart.backends.cuda.int8 import Int8Rows, add_int8, with_int8
from headstart.backends.cuda.kernels import choice
from headstart.backends.cuda.kernels import int8 as int8_kernels
from headstart.backends.cuda.kernels.int8 import choose_int8, gated_int8, integers, partial_int8
from headstart.backends.cuda.kernels.linear import Shape
from headstart.sampling import noise

CUT = Shape(outputs=32, inputs=64, splits=2)


def restored(rounded: Int8Rows) -> Tensor:
    return rounded.weight.float() * rounded.scales[:, None]


def test_a_row_in_two_bytes_is_finer_than_bf16() -> None:
    x = random(3, 100)
    x[2] *= 1e-6
    whole, rest, sizes = integers(x)
    found = (whole.float() + rest.float() / 256) * sizes[:, None]
    largest = x.abs().amax(1, keepdim=True)
    assert ((found - x).abs() <= largest / 127 / 200).all()
    assert not torch.allclose(whole.float() * sizes[:, None], x, rtol=1e-3), (
        "one byte is not enough"
    )


@pytest.mark.parametrize("inputs", [128, 100])
@pytest.mark.parametrize("rows", [1, 5])
def test_products(rows: int, inputs: int) -> None:
    layer, x = layer_of(70, inputs), random(rows, inputs, seed=1)
    rounded = Int8Rows(layer)
    wanted = x @ restored(rounded).T
    found = partial_int8(x, rounded.weight, rounded.scales, CUT).sum(0)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    gate, up = wanted.chunk(2, -1)
    gated = gated_int8(x, rounded.weight, rounded.scales, Shape(outputs=32, inputs=64))
    wanted = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(gated, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("rows", [1, 3])
def test_choices_are_the_samplers(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_TILES_PER_STEP", 2)  # so that there are several steps
    rounded = Int8Rows(layer_of(150, 96))
    x, inv_temps = random(rows, 96, seed=1), torch.tensor([0.0, 1.3, 0.5], device=DEVICE)[:rows]
    seeds, positions = [5, -6, 7][:rows], [1, 2, 3][:rows]
    ids = torch.arange(7, 7 + 3 * 150, 3, device=DEVICE)
    where = torch.tensor(seeds, device=DEVICE), torch.tensor(positions, device=DEVICE)
    found = choose_int8(x, rounded.weight, rounded.scales, inv_temps, *where, ids, CUT)
    logits = x @ restored(rounded).T
    sums = logits * inv_temps[:, None] + noise.gumbel(seeds, positions, ids)
    sums[0] = logits[0]
    assert found.tolist() == ids[sums.argmax(-1)].tolist()


@pytest.mark.parametrize("rows", [16, 17, 32])
def test_choices_by_the_cuts_of_their_rows(rows: int) -> None:
    rounded, x = Int8Rows(layer_of(150, 96)), random(rows, 96, seed=1)
    numbers = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    cuts = []
    plain = int8_kernels._best_of_tile

    class Watched:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*given: Any, **sizes: Any) -> None:
                cuts.append((sizes["BLOCK_M"], sizes["BLOCK_K"]))
                plain[grid](*given, **sizes)

            return launch

    with patch.object(int8_kernels, "_best_of_tile", Watched()):
        found = choose_int8(x, rounded.weight, rounded.scales, numbers.float(), numbers, numbers)
    assert found.tolist() == (x @ restored(rounded).T).argmax(-1).tolist()
    assert cuts == [(16, 256) if rows <= 16 else (32, 128)]


def test_the_copy_stands_beside_the_weights() -> None:
    layer = layer_of(40, 64)
    shared = with_int8(layer)
    assert shared.weight is layer.weight and layer.int8 is None
    assert isinstance(shared.int8, Int8Rows)
    error = (restored(shared.int8) - layer.weight).abs().amax(1)
    assert (error <= layer.weight.abs().amax(1) / 250).all()
    parent = torch.nn.ModuleList([layer])
    add_int8(parent)
    assert isinstance(layer.int8, Int8Rows) and layer.int8.int8 is None
