"""Compile kernels side by side for an H100 without one; run by test_compiling_together.py.

A driver that only names the GPU is enough, since nothing is launched.
"""

from __future__ import annotations

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from headstart.backends.cuda.compiling import compiled_together
from headstart.backends.cuda.kernels import linear
from headstart.backends.cuda.kernels.linear import Shape, partial_linear


class Named:
    """A driver of device 0."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def main() -> None:
    driver.set_active(Named())
    x, weight = (torch.randn(n, 128, dtype=torch.bfloat16) for n in (4, 64))
    with compiled_together():
        for stages in (2, 3):
            partial_linear(x, weight, Shape(outputs=16, inputs=64, stages=stages))
    kernels, *_ = linear._linear.device_caches[0]
    print(sorted(type(kernel).__name__ for kernel in kernels.values()))


if __name__ == "__main__":
    main()
