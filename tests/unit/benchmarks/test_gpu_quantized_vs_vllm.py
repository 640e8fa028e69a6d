"""Quantised checkpoints beside vLLM: checkpoints that are written quickly, and what logs say."""

from __future__ import annotations

from pathlib import Path

import gpu_quantized_vs_vllm as program
import torch
from safetensors.torch import load_file
from versus.quantized_page import told
from versus.quick_checkpoints import write_quickly

SHAPE = "mimo-7b,layers=2,hidden=512,intermediate=256,heads=4,kv_heads=2,vocab=256"
LOG = """
INFO 11-18 [kernels.py:1] Using MacheteLinearKernel for AutoAWQMarlinLinearMethod
INFO 11-18 [kernels.py:1] Using MacheteLinearKernel for AutoAWQMarlinLinearMethod
INFO 11-18 [core.py:2] Using cache directory: /somewhere
INFO 11-18 [runner.py:3] Model loading took 5.96 GiB and 6.2 seconds
"""


def test_layers_hold_the_same_values_and_all_are_there(tmp_path: Path) -> None:
    write_quickly(SHAPE, "fp8-row", tmp_path / "model", rate=0.8, active=8)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    first, second = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    head = "model.mtp_layers.0.mlp.up_proj.weight"
    values = [tensors[name].view(torch.uint8) for name in (first, second, head)]
    assert values[0].any() and all(torch.equal(values[0], other) for other in values[1:])
    scales = [name.removesuffix("weight") + "weight_scale" for name in (first, second, head)]
    assert all(name in tensors for name in scales)


def test_logs_are_told_once_and_without_what_is_no_kernel() -> None:
    found = told(LOG)
    assert found == [
        "Using MacheteLinearKernel for AutoAWQMarlinLinearMethod",
        "Model loading took 5.96 GiB and 6.2 seconds",
    ]


def test_kv_memory_is_for_all_requests() -> None:
    case = program.CASES["awq"]
    tokens = 16 * (program.PROMPT + program.ANSWER)
    assert case.kv_bytes > tokens * 2 * 8 * 128 * 2 * 37
    experts = program.CASES["moe"]
    assert experts.kv_bytes < case.kv_bytes / 4
