"""What matrices take in memory as the compiled kernels hold them: what their files do."""

from __future__ import annotations

import pytest
import torch

from headstart.checkpoint.quantized.reading import quantized_weights
from headstart.checkpoint.quantized.writing import FORMATS, stored_in
from headstart.checkpoint.values import in_memory
from headstart.models.quantized import QuantizedLinear, linear_of

pytest.importorskip("numba")

from headstart.backends.numba.linear import Packed, PackedFloat
from headstart.backends.numba.weight_formats import packed_as_stored

SHAPE = (256, 1024)
FOUR_BITS = ("awq", "gptq", "auto-round", "compressed-tensors")


def read(form: str, group: int) -> tuple[QuantizedLinear, int]:
    """A matrix as a checkpoint in that format gives it, and how many bytes are stored of it."""
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    made = stored_in(FORMATS[form], "layer", in_memory(values), group)
    weight = quantized_weights(made, FORMATS[form].config(group))["layer.weight"]
    return linear_of(weight.quantized(), None, torch.float32), weight.num_bytes


def num_bytes(packed: Packed) -> int:
    held = (packed.weight, packed.factors, packed.offsets, packed.order)
    return sum(tensor.nbytes for tensor in held if tensor is not None)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("form", FOUR_BITS)
def test_4_bits_take_what_they_take_in_the_file(form: str, group: int) -> None:
    source, stored = read(form, group)
    packed = packed_as_stored(source)
    assert not isinstance(packed, PackedFloat)
    assert num_bytes(packed) <= 1.05 * stored
