"""Rounding for the inputs that a matrix gets: products change less than by rounding to nearest."""

from __future__ import annotations

import pytest
import torch

from headstart.checkpoint.quantized.nearest import as_compressed
from headstart.checkpoint.quantized.reading import quantized_weights
from headstart.checkpoint.quantized.writing import COMPRESSED_GROUPS, compressed_config
from headstart.checkpoint.values import in_memory
from headstart.quantize import rounding
from headstart.quantize.rounding import Bits, rounded

BITS: tuple[Bits, ...] = ("4", "8", "fp8")


def inputs(rows: int = 2000, width: int = 96) -> torch.Tensor:
    """Rows whose numbers go together, some of them much larger than others."""
    draw = torch.Generator().manual_seed(0)
    mixed = torch.randn(rows, width, generator=draw) @ torch.randn(width, width, generator=draw)
    return mixed * torch.rand(width, generator=draw) ** 2


def matrix(rows: int = 64, width: int = 96) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def error(x: torch.Tensor, found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((found - wanted) @ x.T).square().mean())


@pytest.mark.parametrize("bits", BITS)
def test_products_with_its_own_inputs_change_less_than_by_rounding_to_nearest(bits: Bits) -> None:
    x, values = inputs(), matrix()
    found = rounded(values, bits, 32, x.T @ x).dequantized(torch.float32)
    nearest = rounded(values, bits, 32, None).dequantized(torch.float32)
    assert error(x, found, values) < 0.7 * error(x, nearest, values)
    # The control: for other inputs it is no better.
    other = torch.randn(2000, 96, generator=torch.Generator().manual_seed(7))
    assert error(other, found, values) > error(other, nearest, values)


@pytest.mark.parametrize("bits", BITS)
def test_rows_do_not_depend_on_how_many_are_rounded_at_a_time(
    bits: Bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, values = inputs(), matrix()
    whole = rounded(values, bits, 32, x.T @ x).dequantized(torch.float32)
    monkeypatch.setattr(rounding, "_VALUES", 10 * 96)
    parts = rounded(values, bits, 32, x.T @ x).dequantized(torch.float32)
    torch.testing.assert_close(whole, parts, rtol=0.02, atol=0.2)
    assert (whole != parts).float().mean() < 0.01


@pytest.mark.parametrize("bits", BITS)
def test_what_is_rounded_is_what_is_read(bits: Bits) -> None:
    x, values = inputs(), matrix()
    made = rounded(values, bits, 32, x.T @ x)
    tensors = {f"a.b.{suffix}": in_memory(each) for suffix, each in as_compressed(made).items()}
    group = {"targets": ["a.b"], **COMPRESSED_GROUPS[bits](32)}
    config = compressed_config({"group_0": group}, str(group["format"]))
    read = quantized_weights(tensors, config)["a.b.weight"]
    assert torch.equal(read.values(torch.float32), made.dequantized(torch.float32))
    assert read.form == made.form


def test_inputs_that_were_never_seen_and_groups_of_zeros() -> None:
    values = matrix()
    values[3] = 0
    seen = torch.zeros(96, 96)
    nearest = rounded(values, "4", 32, None).dequantized(torch.float32)
    assert torch.equal(rounded(values, "4", 32, seen).dequantized(torch.float32), nearest)
    seen[0, 0] = 5.0  # one input alone: nothing goes together with it
    found = rounded(values, "4", 32, seen).dequantized(torch.float32)
    assert torch.isfinite(found).all() and not found[3].any()
