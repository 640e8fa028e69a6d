"""Experts in 8-bit floats: what is held of them, and where a program finds its expert's part.

M rows, E routed experts, H model width, W width of an expert, V width of the shared MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.eight_bits import GROUP
from headstart.backends.cuda.kernels.jit import jit

_GROUP = tl.constexpr(GROUP)


@dataclass(frozen=True)
class Fp8Matrices:
    """weight [..., N, K] e4m3; scales [..., N] fp32, or [..., N / 128, K / 128] of blocks."""

    weight: Tensor
    scales: Tensor

    @property
    def is_blocked(self) -> bool:
        return self.scales.dim() == self.weight.dim()

    @property
    def each_bytes(self) -> int:
        """Of one expert's."""
        return (self.weight.nbytes + self.scales.nbytes) // len(self.weight)


@dataclass(frozen=True)
class Fp8Experts:
    """gate_up [E, 2 W, H] and down [E, H, W]; the shared ones [2 V, H] and [H, V], or None."""

    gate_up: Fp8Matrices
    down: Fp8Matrices
    shared_gate_up: Fp8Matrices | None = None
    shared_down: Fp8Matrices | None = None

    @property
    def count(self) -> int:
        return self.down.weight.shape[0]

    @property
    def width(self) -> int:
        return self.down.weight.shape[2]

    @property
    def shared_width(self) -> int:
        return 0 if self.shared_down is None else self.shared_down.weight.shape[1]

    @property
    def num_shared(self) -> int:
        """Experts that the shared MLP counts as; the last one may be narrower."""
        return -(-self.shared_width // self.width)

    @property
    def expert_bytes(self) -> int:
        return self.gate_up.each_bytes + self.down.each_bytes

    @property
    def operands(self) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
        """Weights and scales of the first and of the second product, the shared ones after."""
        first, second = self.shared_gate_up, self.shared_down
        shared = first and (first.weight, first.scales), second and (second.weight, second.scales)
        return (
            (self.gate_up.weight, self.gate_up.scales, *(shared[0] or (None, None))),
            (self.down.weight, self.down.scales, *(shared[1] or (None, None))),
        )


@jit
def first_matrix(weight, scales, shared, shared_scales, expert, column, hidden, width, shared_width,
                 num_experts, IS_BLOCKED: tl.constexpr):  # fmt: skip
    """Of gate and up of an expert: where its first number is, where the scale of output `column`
    of gate is, rows from gate to up, and how many outputs it has."""
    per_line = tl.cdiv(hidden, _GROUP)
    base = weight + expert.to(tl.int64) * 2 * width * hidden
    size = scales + expert.to(tl.int64) * 2 * width + column
    if IS_BLOCKED:
        line = expert.to(tl.int64) * (2 * width // _GROUP) + column // _GROUP
        size = scales + line * per_line
    to_up = width
    outputs = width
    if shared is not None:
        part = (expert - num_experts) * width  # columns of the shared MLP before this one's
        if part >= 0:
            base = shared + part.to(tl.int64) * hidden
            size = shared_scales + part + column
            if IS_BLOCKED:
                # Columns behind the last one have zeros; a scale of theirs is not there.
                at = tl.minimum(part + column, shared_width - 1)
                size = shared_scales + at // _GROUP * per_line
            to_up = shared_width
            outputs = tl.minimum(width, shared_width - part)
    return base, size, to_up, outputs


@jit
def second_matrix(weight, scales, shared, shared_scales, expert, column, hidden, width,
                  shared_width, num_experts, IS_BLOCKED: tl.constexpr):  # fmt: skip
    """Of down: where its first number is, where the scale of output `column` is, numbers from one
    output to the next, and how many inputs it has."""
    base = weight + expert.to(tl.int64) * width * hidden
    size = scales + expert.to(tl.int64) * hidden + column
    if IS_BLOCKED:
        line = expert.to(tl.int64) * tl.cdiv(hidden, _GROUP) + column // _GROUP
        size = scales + line * tl.cdiv(width, _GROUP)
    stride = width
    inputs = width
    if shared is not None:
        part = (expert - num_experts) * width
        if part >= 0:
            base = shared + part
            size = shared_scales + column
            if IS_BLOCKED:
                per_line = tl.cdiv(shared_width, _GROUP)
                size = shared_scales + column // _GROUP * per_line + part // _GROUP
            stride = shared_width
            inputs = tl.minimum(width, shared_width - part)
    return base, size, stride, inputs
