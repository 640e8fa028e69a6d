"""Checks on a GPU what the CPU tests cannot: fused attention of training, with its gradients.

Run as `PYTHONPATH=. python3 scripts/gpu_training_check.py`; prints one line per case, exits 1 on
a difference larger than half precision explains.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from headstart.models import ragged

CASES = {  # lengths, heads, key heads, head size, own keys
    "one document": ((512,), 8, 8, 64, 0),
    "packed, grouped": ((300, 1, 17, 700), 32, 8, 128, 0),
    "packed, grouped, chain of 1": ((300, 1, 17, 700), 32, 8, 128, 1),
    "packed, grouped, chain of 4": ((300, 1, 17, 700), 9, 3, 64, 4),
}
LARGEST_ERROR = 0.02  # of the largest value: a few units in the last place of bf16


def main() -> int:
    failed = 0
    for name, (lengths, heads, kv, dim, own) in CASES.items():
        error = worst_error(lengths, heads, kv, dim, own)
        failed += error > LARGEST_ERROR
        print(f"{name}: largest relative error of result and gradients {error:.4f}")
    return int(failed > 0)


def worst_error(lengths: tuple[int, ...], heads: int, kv: int, dim: int, own: int) -> float:
    torch.manual_seed(0)
    rows = sum(lengths)
    shapes = [(rows, heads, dim), (rows, kv, dim), (rows, kv, dim)] + [(own, rows, kv, dim)] * 2
    inputs = [torch.randn(shape, device="cuda") for shape in shapes]
    goal = torch.randn(shapes[0], device="cuda")
    half = _results(inputs, goal, lengths, torch.bfloat16)
    full = _results([t.bfloat16() for t in inputs], goal.bfloat16(), lengths, torch.float32)
    pairs = zip(half, full, strict=True)
    return max(((a.float() - b).abs().max() / b.abs().max()).item() for a, b in pairs if b.numel())


def _results(
    inputs: list[Tensor], goal: Tensor, lengths: tuple[int, ...], dtype: torch.dtype
) -> list[Tensor]:
    """Result and gradients; in fp32 the dense formula is used, in bf16 the fused kernel."""
    leaves = [t.to(dtype, copy=True).requires_grad_() for t in inputs]
    q, k, v, own_k, own_v = leaves
    result = ragged.chained_attention(q, k, v, own_k, own_v, lengths)
    torch.autograd.backward(result, goal.to(dtype))
    grads = [t.grad if t.grad is not None else torch.zeros_like(t) for t in leaves]
    return [result.detach(), *grads]


if __name__ == "__main__":
    sys.exit(main())
