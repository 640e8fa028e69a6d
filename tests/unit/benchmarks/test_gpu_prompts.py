"""The program that compares the attention of prompts, in tiny sizes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("triton")

import gpu_prompts
from graph_timing import DEVICE

from headstart.backends.cuda.libraries import LIBRARIES
from headstart.calibrate.shape_config import shape_config
from headstart.models.config_reader import model_config

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="sizes are those of a GPU there")


def test_prompts_are_cut_as_the_scheduler_cuts_them() -> None:
    plan = gpu_prompts.passes([50, 50])
    assert [[(w.request.id, w.start, w.count) for w in works] for works in plan] == [
        [("0", 0, 50), ("1", 0, 31)], [("1", 31, 19)],
    ]  # fmt: skip
    assert {block for w in plan[0] for block in w.request.blocks} == set(range(8))


def test_results_are_compared_with_our_kernel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_prompts, "CASES", {"two": ([20, 20], 5)})
    right = replace(LIBRARIES["cudnn"], least_later_rows=8)
    wrong = replace(right, attend=lambda q, k, v: right.attend(q, k, v.flip(0)))
    config = model_config(shape_config(gpu_prompts.SMALL))
    gpu_prompts.compare_attention(config, {"ours": None, "right": right, "wrong": wrong})
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["by"] for row in rows] == ["ours", "right", "wrong"]
    assert rows[1]["gap"] < 1e-3 and rows[2]["gap"] > 0.5
