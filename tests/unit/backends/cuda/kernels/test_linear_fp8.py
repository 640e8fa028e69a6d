"""Products with fp8 weights against plain PyTorch over the same weights, dequantised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from headstart.backends.cuda.fp8 import KernelFp8Linear
from headstart.backends.cuda.kernels import fp8
from headstart.backends.cuda.kernels.choice import choose_rows
from headstart.backends.cuda.kernels.fp8 import dequantized_rows, fp8_linear
from headstart.backends.cuda.kernels.linear import (
    Shape,
    fp8_shape_for,
    gated_linear,
    partial_linear,
)
from headstart.models.linear import Linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE)


def layer(outputs: int, inputs: int) -> KernelFp8Linear:
    """Rows of very different sizes, so that a scale in the wrong place shows."""
    source = Linear(inputs, outputs)
    sizes = torch.logspace(-3, 1, outputs, device=DEVICE)
    source.weight.data = random(outputs, inputs) * sizes[:, None]
    return KernelFp8Linear.of(source)


@pytest.mark.parametrize("rows", [1, 16, 70])
@pytest.mark.parametrize("inputs", [256, 200], ids=["even", "ragged"])
def test_partial_products_add_up_to_the_product(rows: int, inputs: int) -> None:
    x, made = random(rows, inputs), layer(100, inputs)
    cut = Shape(outputs=32, inputs=64, splits=3)
    found = partial_linear(x, made.weight, cut, scales=made.scales)
    assert found.shape == (3, rows, 100)
    wanted = x @ made.dequantized(torch.float32).T
    torch.testing.assert_close(found.sum(0), wanted, rtol=1e-4, atol=1e-3)


def test_a_row_does_not_depend_on_how_many_rows_there_are() -> None:
    x, made = random(9, 256), layer(96, 256)
    whole = partial_linear(x, made.weight, scales=made.scales)
    part = partial_linear(x[:2].contiguous(), made.weight, scales=made.scales)
    assert torch.equal(part, whole[:, :2])


@pytest.mark.parametrize("inputs", [128, 90], ids=["even", "ragged"])
def test_gated_product(inputs: int) -> None:
    x, made = random(5, inputs), layer(2 * 70, inputs)
    gate, up = (x @ made.dequantized(torch.float32).T).chunk(2, -1)
    found = gated_linear(x, made.weight, Shape(outputs=32, inputs=64), scales=made.scales)
    wanted = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_the_fused_choice_with_a_draft_vocabulary() -> None:
    x, made = random(4, 64), layer(150, 64)
    chosen = torch.arange(1, 150, 3, device=DEVICE)
    part = made.only_rows(chosen)
    inv_temps, zeros = (
        torch.zeros(4, device=DEVICE),
        torch.zeros(4, dtype=torch.int64, device=DEVICE),
    )
    cut = Shape(outputs=32, inputs=32)
    best = chosen[(x @ part.dequantized(torch.float32).T).argmax(-1)].tolist()
    found = choose_rows(x, part.weight, inv_temps, zeros, zeros, chosen, cut, scales=part.scales)
    assert found.tolist() == best
    unscaled = chosen[(x @ part.weight.float().T).argmax(-1)].tolist()
    assert unscaled != best  # the scales decide here


@pytest.mark.parametrize("rows", [3, 257])
def test_few_rows_by_conversion_and_many_by_parts(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "_COPIED_VALUES", 40 * 96)  # two parts and a rest
    x, made = random(rows, 96), layer(100, 96)
    found = fp8_linear(x, made.weight, made.scales)
    wanted = x @ made.dequantized(torch.float32).T
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_a_copy_is_the_matrix() -> None:
    made = layer(7, 90)
    for dtype in (torch.float32, torch.float16):
        found = dequantized_rows(made.weight, made.scales, dtype)
        assert torch.equal(found, made.dequantized(dtype))


def test_rows_beyond_the_smallest_tile_get_fewer_splits_and_fit_the_tiles() -> None:
    # A matrix whose cut was measured, one that is cut by rule, and one with outputs enough.
    for outputs, inputs in ((4096, 4096), (2048, 8192), (151680, 4096)):
        shapes = [fp8_shape_for(outputs, inputs, rows) for rows in (1, 17, 64, 65, 256)]
        splits = [shape.splits for shape in shapes]
        assert all(inputs % shape.inputs == 0 for shape in shapes)
        if outputs == 151680:
            assert splits == [1] * 5
        else:
            assert splits[0] > splits[1] > 1
