"""The program that compares cuts of attention, in tiny sizes."""

from __future__ import annotations

import argparse

import pytest

pytest.importorskip("triton")

import gpu_attention
from graph_timing import DEVICE

from headstart.backends.cuda.kernels.attention_cuts import Cut

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="sizes are those of a GPU there")
SIZES = argparse.Namespace(mixed=False, max_context=0, context=40, heads=2, kv_heads=1, dim=16)


def test_cuts_are_compared_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = gpu_attention.make(2, 2, SIZES)
    assert contexts.num_bytes == 2 * 2 * 40 * 16 * 4
    cuts = [Cut(pieces=2, step=16), Cut(pieces=1, step=32), Cut(pieces=4, step=16)]
    first, *others = gpu_attention.measure(contexts, cuts)
    assert first["cut"]["pieces"] == 2 and first["tb_per_second"] >= 0
    assert [row["us"] for row in others] == sorted(row["us"] for row in others)
    right = gpu_attention.paged_attention

    def wrong(*parts, cut, **more):
        return right(*parts, cut=cut, **more) + (cut.pieces == 1)

    monkeypatch.setattr(gpu_attention, "paged_attention", wrong)
    with pytest.raises(AssertionError):
        gpu_attention.measure(contexts, cuts)


def test_8_bit_floats_are_compared_with_what_they_mean() -> None:
    fp8, plain = gpu_attention.in_fp8(gpu_attention.make(2, 1, SIZES))
    found = gpu_attention.compare(fp8, plain, Cut(pieces=2, step=16))
    assert found["bytes_ratio"] == round(2 * 16 * 4 / (2 * 16 + 4), 2)
    assert found["ratio"] > 0
