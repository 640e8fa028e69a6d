"""Products of bf16 in Triton's interpreter, which would multiply their bits as integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


def repair_bf16(patch: pytest.MonkeyPatch) -> None:
    """Widen bf16 operands first, which is exact."""
    plain = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar is not tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, widened(a), widened(b), *rest)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
