"""Which products vLLM's libraries compile kernels for, told from a checkpoint's files."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from versus.vllm_kernels import FEW, ROWS, jobs, sizes


def test_matrices_are_merged_as_vllm_does_and_experts_left_out(tmp_path: Path) -> None:
    shapes = {
        "self_attn.q_proj": (256, 128), "self_attn.k_proj": (128, 128),
        "self_attn.v_proj": (128, 128), "self_attn.o_proj": (128, 256),
        "mlp.experts.0.gate_proj": (384, 128), "mlp.experts.0.up_proj": (384, 128),
        "mlp.gate_proj": (32, 128), "mlp.up_proj": (32, 128),
    }  # fmt: skip
    tensors = {
        f"model.layers.0.{name}.weight": torch.zeros(shape).to(torch.float8_e4m3fn)
        for name, shape in shapes.items()
    }
    save_file(tensors | {"lm_head.weight": torch.zeros(640, 128)}, tmp_path / "model.safetensors")
    assert sizes(tmp_path) == {(512, 128), (128, 256), (64, 128)}
    found = list(jobs([tmp_path], most_rows=4096))
    assert {rows for library, *_, rows in found if library == "flashinfer"} == {FEW}
    assert [rows for library, *_, rows in found if library == "deep_gemm"] == [
        rows for rows in ROWS[:3] for _ in range(3)
    ]
