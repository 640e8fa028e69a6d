"""Matrices in 8-bit floats: which kernel, or which library, computes a product of how many rows.

Rows are rounded once per product, norms before one by the kernel that makes them.

M rows, N outputs, K inputs, S splits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from torch import Tensor

from headstart.backends.cuda import fp8_library
from headstart.backends.cuda.kernel_linear import KernelLinear, Rounded
from headstart.backends.cuda.kernels.eight_bits import GROUP, Fp8Rows, fp8_rows, silu_fp8
from headstart.backends.cuda.kernels.fp8_products import (
    MAX_FUSED_ROWS,
    TILE_ROWS,
    choose_fp8,
    cut_for,
    gated_fp8,
    partial_fp8,
)
from headstart.backends.cuda.kernels.rows import silu_product
from headstart.models.quantized import Fp8Linear

MAX_FP8_ROWS = TILE_ROWS[-1]  # of own tiles, where a library would do


class KernelFp8(KernelLinear, Fp8Linear):
    """8-bit floats on both sides, with scales of rows, or of 128 x 128 and of 128 inputs."""

    def partial(self, x: Tensor | Rounded) -> Tensor:
        rows = self._rounded(x)
        if rows.shape[0] > MAX_FP8_ROWS:
            return self._product(rows).unsqueeze(0)
        return partial_fp8(rows, self.weight, self.scales)

    def whole(self, x: Tensor) -> Tensor:
        return self._product(self._rounded(x)).to(x.dtype)

    def gated(self, x: Tensor | Rounded) -> Tensor:
        rows = self._rounded(x)
        if rows.shape[0] > MAX_FUSED_ROWS[self._is_blocked]:
            return silu_product(self._product(rows))
        return gated_fp8(rows, self.weight, self.scales, dtype=self.dtype)

    def gated_for(self, x: Tensor | Rounded, down: KernelLinear) -> Tensor | Rounded:
        if not isinstance(down, KernelFp8):
            return self.gated(x)
        rows = self._rounded(x)
        if rows.shape[0] > MAX_FUSED_ROWS[self._is_blocked]:
            return silu_fp8(self._product(rows).unsqueeze(0), down.group)
        # The scale of a row needs all its outputs, which no single program of the product has.
        return down._rounded(self.gated(rows))

    def choose(
        self, x: Tensor, inv_temps: Tensor, seeds: Tensor, positions: Tensor,
        token_ids: Tensor | None,
    ) -> Tensor:  # fmt: skip
        if len(x) > MAX_FP8_ROWS:
            return super().choose(x, inv_temps, seeds, positions, token_ids)
        return choose_fp8(
            self._rounded(x), self.weight, self.scales, inv_temps, seeds, positions, token_ids
        )

    @property
    def _is_blocked(self) -> bool:
        return self.scales.dim() == 2

    @property
    def group(self) -> int:
        """Inputs of a row that share a scale; 0: all."""
        return GROUP if self._is_blocked else 0

    def _rounded(self, x: Tensor | Rounded) -> Fp8Rows:
        if isinstance(x, Tensor):
            return fp8_rows(x.contiguous(), self.group)
        assert isinstance(x, Fp8Rows) and x.group == self.group
        return x

    def _product(self, rows: Fp8Rows) -> Tensor:
        """x W^T [M, N] in the type that the model computes in."""
        weight, many = self.weight, MAX_FUSED_ROWS[self._is_blocked]
        if rows.shape[0] > many and fp8_library.takes(rows, weight, self.scales, self.dtype):
            return fp8_library.library_fp8(rows, weight, self._library_scales, self.dtype)
        shape, streams = cut_for(weight, rows.shape[0], is_blocked=self._is_blocked)
        shape = replace(shape, splits=1)
        found = partial_fp8(rows, weight, self.scales, shape, streams=streams, dtype=self.dtype)
        return found[0]

    def prepare(self) -> None:
        """Make what a captured pass must find: nothing may be tried or kept while capturing."""
        if (
            self._is_blocked
            and self.weight.is_cuda
            and fp8_library.takes_blocks(self.weight.device)
        ):
            _ = self._library_scales

    @cached_property
    def _library_scales(self) -> Tensor:
        return fp8_library.library_scales(self.scales)
