"""The program that compares how recurrent layers read prompts, in tiny sizes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("triton")

import gpu_recurrent_prompts
import torch
from gpu_recurrent_prompts import CASES, make_net, make_spans, measure
from graph_timing import DEVICE
from torch import Tensor

from headstart.models.delta_rule import DeltaRows, scan_texts

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="sizes are those of a GPU there")


def forgetful(
    texts: Sequence[DeltaRows], memories: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    return scan_texts(texts, [torch.zeros_like(memory) for memory in memories])


@torch.inference_mode()
def test_layers_are_compared_with_our_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_recurrent_prompts, "_PASSES", 1)
    case, net = "4 x 2500, two states", make_net()
    right, wrong = (measure(net, case, scan) for scan in (scan_texts, forgetful))
    assert right["largest"] == right["norm"] == right["states_norm"] == 0
    assert min(wrong["largest"], wrong["norm"], wrong["states_norm"]) > 0.01
    assert all(measure(net, name, scan_texts)["rule_ratio"] > 0 for name in CASES)


def test_texts_follow_one_another_and_keep_the_end_of_their_last_whole_block() -> None:
    first, second = make_spans([50, 32], True)
    assert (first.start, first.stop, first.keeps) == (0, 50, ((48, 1), (50, 0)))
    assert (second.start, second.stop, second.keeps) == (50, 82, ((16, 3), (32, 2)))
