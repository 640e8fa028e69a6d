"""What Triton's interpreter does otherwise than a GPU with bf16 and 8-bit floats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def repair_bf16(patch: pytest.MonkeyPatch) -> None:
    """Widen bf16 operands of products, whose bits would be multiplied; which is exact."""
    plain = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar is not tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, widened(a), widened(b), *rest)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def round_bf16(patch: pytest.MonkeyPatch) -> None:
    """Round fp32 to the nearest bf16, as GPUs do, instead of cutting bits off."""
    plain = interpreter.InterpreterBuilder.cast_impl

    def rounded(self: Any, source: Any, target: Any) -> Any:
        if target.scalar is not tl.bfloat16 or source.dtype.scalar is not tl.float32:
            return plain(self, source, target)
        values = torch.from_numpy(np.array(source.data)).to(torch.bfloat16)
        return interpreter.TensorHandle(values.view(torch.int16).numpy().view(np.uint16),
                                        tl.bfloat16)  # fmt: skip

    patch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounded)


def repair_fp8(patch: pytest.MonkeyPatch) -> None:
    """Round fp32 to the nearest e4m3, as GPUs do, instead of cutting bits off."""
    plain = interpreter.InterpreterBuilder.create_fp_to_fp

    def rounded(self: Any, source: Any, target: Any, mode: Any) -> Any:
        if target.scalar is not tl.float8e4nv or source.dtype.scalar is not tl.float32:
            return plain(self, source, target, mode)
        values = torch.from_numpy(np.array(source.data)).to(torch.float8_e4m3fn)
        return interpreter.TensorHandle(values.view(torch.uint8).numpy(), tl.float8e4nv)

    patch.setattr(interpreter.InterpreterBuilder, "create_fp_to_fp", rounded)
