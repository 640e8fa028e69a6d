"""The program that checks and times prompts of delta nets, in tiny sizes."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import gpu_delta_prompts
import torch
from gpu_delta_prompts import check, floor_seconds, make_net, make_spans
from graph_timing import DEVICE
from support.quick_interpreter import quicken

from headstart.models.delta_config import DeltaConfig

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="numbers are bf16 there")


@torch.inference_mode()
def test_kernels_pass_and_wrong_numbers_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)
    net = make_net("tiny")
    assert check("tiny", net, [20, 3])
    monkeypatch.setattr(gpu_delta_prompts.PromptRows, "run", lambda self, net, x, *_: x[:, :24])
    assert not check("tiny", net, [20, 3])


def test_texts_follow_one_another_and_keep_states_at_ends_of_blocks() -> None:
    first, second = make_spans([50, 32], keeps=True)
    assert (first.start, first.stop, first.source) == (0, 50, None)
    assert first.keeps == ((16, 1), (48, 2), (50, 0)) and second.keeps == ((16, 4), (32, 3))
    assert (second.start, second.stop, second.source) == (50, 82, 3)


def test_the_floor_counts_bytes_and_products() -> None:
    config = DeltaConfig(k_heads=1, v_heads=2, k_dim=128, v_dim=128, kernel=4)
    by_bytes, by_products = floor_seconds(config, 64, 1e9)
    assert by_bytes == pytest.approx(64 * 2 * (512 + 2 * 256 + 4) / 1e9)
    of_chunk = 4 * 64 * 64 * 128 + 64 * 64 * 128 + 3 * 64 * 128 * 128
    assert by_products * 900e12 == pytest.approx(2 * 2 * (of_chunk + 64 * 64 * 128))
