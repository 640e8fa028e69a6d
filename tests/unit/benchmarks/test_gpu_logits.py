"""The check of logits against transformers passes, and fails where a weight is off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from gpu_logits import INTERPRETED, Case

pytestmark = pytest.mark.usefixtures("quick_kernels")


@torch.inference_mode()
def test_logits_are_those_of_transformers_and_a_changed_norm_shows(tmp_path: Path) -> None:
    small = replace(INTERPRETED, prompts=(1, 9), answer=4)
    case = Case("qwen2", "float32", small, torch.device("cpu"), tmp_path)
    assert [check.is_right for check in case.checks()] == [True, True]
    case._engine.model.trunk.final_norm.weight *= torch.linspace(0.9, 1.1, 64)
    changed = case._compare_logits(case._answer(logprobs=small.vocab))
    assert changed.tolerance < changed.error and not changed.is_right
