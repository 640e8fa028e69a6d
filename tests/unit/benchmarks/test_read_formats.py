"""What `formats_quality.py` compares beside the formats that are written: rounded as it says."""

from __future__ import annotations

import pytest
import torch
from read_formats import READ, RoundedRows, rounded_rows
from support.interpreted_bf16 import repair_fp8
from support.kernel_inputs import DEVICE, random
from support.quantized_tensors import source

from headstart.checkpoint.quantized.reading import quantized_weights
from headstart.checkpoint.quantized.writing import stored_in
from headstart.models.linear import Linear
from headstart.models.quantized import Fp8Linear


@pytest.mark.parametrize(("name", "words"), [("int8-group", "8 bits in groups of 32"),
                                             ("mxfp8", "MXFP8")])  # fmt: skip
def test_what_is_read_back_is_near(name: str, words: str) -> None:
    values = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    form = READ[name]
    stored = stored_in(form, "a", source(values), 32)
    weight = quantized_weights(stored, form.config(32))["a.weight"]
    assert words in weight.words
    largest = values.view(48, 3, 32).abs().amax(-1).repeat_interleave(32, 1)
    # One step, with scales in BF16; of 3 bits, or what a power of two cuts off.
    bound = largest / 127 if name == "int8-group" else largest / 8
    error = (weight.values(torch.float32) - values).abs()
    assert (error <= bound).all() and error.max() > bound.max() / 4


@pytest.mark.parametrize("group", [0, 128])
def test_rows_are_those_of_the_kernels(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from headstart.backends.cuda.kernels.eight_bits import fp8_rows

    if DEVICE == "cpu":
        repair_fp8(monkeypatch)
    x = random(5, 320, seed=1)  # the last group is ragged
    found = fp8_rows(x, group)
    scales = found.scales.t().repeat_interleave(group or 320, 1)[:, :320]
    torch.testing.assert_close(rounded_rows(x, group), found.values.float() * scales)
    assert not torch.equal(rounded_rows(x, 0), rounded_rows(x, 128))


def test_only_products_with_8_bit_floats_are_rounded() -> None:
    plain = Linear(64, 6)
    plain.weight.data = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    assert RoundedRows.of(plain) is plain
    held, x = Fp8Linear.of(plain), torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    made = RoundedRows.of(held)
    torch.testing.assert_close(made(x), held(rounded_rows(x, 0)))
    assert not torch.allclose(made(x), held(x), atol=1e-4)
