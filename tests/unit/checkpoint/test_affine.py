"""MLX's affine quantisation, against numbers of mlx 0.32.4 and against its own definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from headstart.checkpoint.affine import BITS, Affine, dequantized, quantized
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import as_bytes, load
from headstart.errors import BadConfig, ShapeMismatch

KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def source(values: torch.Tensor) -> TensorSource:
    data = bytes(as_bytes(values))
    return TensorSource(KINDS[values.dtype], tuple(values.shape), lambda: (data,), is_copy=False)


@pytest.mark.parametrize(
    ("bits", "words", "scale"),
    [
        (3, [3018904991, 822959498, 359129515], -0.26875001192092896),
        (4, [3894037615, 1567724485, 2765490475, 440168066], -0.13437500596046448),
    ],
)
def test_words_scales_and_biases_are_those_of_mlx(
    bits: int, words: list[int], scale: float
) -> None:
    values = torch.tensor([[((i * 37) % 64 - 20) / 32 for i in range(32)]])
    made = {name: load(each) for name, each in quantized(source(values), Affine(bits, 32)).items()}
    assert made["weight"].dtype == torch.uint32 and made["weight"].tolist() == [words]
    assert made["scales"].tolist() == [[scale]] and made["biases"].tolist() == [[1.34375]]


@given(
    values=arrays(np.float32, (3, 64), elements=st.floats(-4, 4, width=32)),
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from(list(KINDS)),
)
@settings(max_examples=25, deadline=None)
def test_values_come_back_close_to_what_they_were(
    values: np.ndarray, bits: int, dtype: torch.dtype
) -> None:
    given = torch.from_numpy(values).to(dtype)
    how = Affine(bits, 32)
    parts = quantized(source(given), how)
    back = load(dequantized("x", parts["weight"], parts["scales"], parts["biases"], how))
    assert back.dtype == dtype and back.shape == given.shape
    step = load(parts["scales"]).float().abs().repeat_interleave(32, 1)
    # MLX moves the scale so that the largest value is exact, and cuts the other end by up to one.
    # Scale, bias and sum are rounded to the dtype, each by a share of the largest value
    share = torch.finfo(dtype).eps * (1 << bits)
    largest = given.float().view(3, 2, 32).abs().amax(-1).repeat_interleave(32, 1)
    assert ((back.float() - given.float()).abs() <= 1.51 * step + 2 * share * largest + 1e-6).all()


def test_many_rows_are_read_in_step() -> None:
    values = torch.randn(700, 256, generator=torch.Generator().manual_seed(0))
    how = Affine(4, 64)
    parts = quantized(source(values), how)
    back = load(dequantized("x", parts["weight"], parts["scales"], parts["biases"], how))
    assert (back - values).abs().max() < 0.5


def test_a_stack_of_experts_keeps_its_shape() -> None:
    parts = quantized(source(torch.ones(4, 6, 64)), Affine(8, 64))
    assert {name: each.shape for name, each in parts.items()} == {
        "weight": (4, 6, 16), "scales": (4, 6, 1), "biases": (4, 6, 1),
    }  # fmt: skip


def test_parts_that_do_not_belong_together_are_refused() -> None:
    parts = quantized(source(torch.ones(2, 64)), Affine(4, 64))
    with pytest.raises(ShapeMismatch, match=r"expected those of 8 bits in groups of 64"):
        dequantized("x", parts["weight"], parts["scales"], parts["biases"], Affine(8, 64))
    with pytest.raises(BadConfig, match="has bits 7 and group_size 64; expected bits of 2, 3"):
        Affine(7, 64)
