"""The program that compares cuts of latent attention, in tiny sizes."""

from __future__ import annotations

import argparse

import pytest

pytest.importorskip("triton")

import gpu_latent
from graph_timing import DEVICE

from headstart.backends.cuda.kernels.attention_cuts import Cut

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="sizes are those of a GPU there")
SIZES = argparse.Namespace(context=40, heads=2, rank=16, rope=4, nope=8, value=8)


def test_cuts_are_compared_and_products_timed() -> None:
    contexts = gpu_latent.make(2, 2, SIZES)
    assert contexts.num_bytes == 2 * 40 * 20 * 4
    cuts = [Cut(pieces=2, step=16), Cut(pieces=1, step=32, lines=16)]
    first, second = gpu_latent.measure(contexts, cuts)
    assert first["cut"]["pieces"] == 2 and second["cut"]["lines"] == 16
    assert gpu_latent.products(4, SIZES) > 0
    assert all(cut.lines == 16 for cut in gpu_latent.cuts_of(80, 512))
