"""What matrices take in memory as the compiled kernels hold them: what their files do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from headstart.checkpoint.quantized.reading import quantized_weights
from headstart.checkpoint.quantized.writing import FORMATS, stored_in
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import in_memory
from headstart.models.quantized import linear_of

pytest.importorskip("numba")

from headstart.backends.numba.linear import Packed, PackedFloat
from headstart.backends.numba.weight_formats import packed_as_stored

SHAPE = (256, 1024)
FOUR_BITS = ("awq", "gptq", "auto-round", "compressed-tensors")
EIGHT_BITS = ("fp8-row", "fp8-tensor", "fp8-block", "int8-row")


def read(tensors: Mapping[str, TensorSource], config: dict[str, Any]) -> tuple[Packed, int]:
    """A matrix as the kernels hold it, and how many bytes are stored of it."""
    weight = quantized_weights(tensors, config)["layer.weight"]
    return packed_as_stored(linear_of(weight.quantized(), None, torch.float32)), weight.num_bytes


def written(form: str, group: int) -> tuple[Packed, int]:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    made = stored_in(FORMATS[form], "layer", in_memory(values), group)
    return read(made, FORMATS[form].config(group))


def num_bytes(packed: Packed) -> int:
    held = (packed.weight, packed.factors, packed.offsets, packed.order)
    return sum(tensor.nbytes for tensor in held if tensor is not None)


def assert_no_larger(packed: Packed, stored: int) -> None:
    assert not isinstance(packed, PackedFloat)
    assert num_bytes(packed) <= 1.05 * stored


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("form", FOUR_BITS)
def test_4_bits_take_what_they_take_in_the_file(form: str, group: int) -> None:
    assert_no_larger(*written(form, group))


@pytest.mark.parametrize("form", EIGHT_BITS)
def test_8_bits_take_what_they_take_in_the_file(form: str) -> None:
    assert_no_larger(*written(form, 0))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("has_zeros", [True, False], ids=["zeros", "symmetric"])
def test_8_bits_in_groups_take_what_they_take_in_the_file(group: int, has_zeros: bool) -> None:
    """As compressed-tensors stores them (int-quantized)."""
    shape = (SHAPE[0], SHAPE[1] // group)
    tensors = {
        "layer.weight": torch.zeros(SHAPE, dtype=torch.int8),
        "layer.weight_scale": torch.ones(shape, dtype=torch.bfloat16),
    }
    if has_zeros:
        tensors["layer.weight_zero_point"] = torch.zeros(shape, dtype=torch.int8)
    packed, stored = read({name: in_memory(value) for name, value in tensors.items()}, {})
    assert_no_larger(packed, stored)
