"""A quantised weight as a checkpoint stores it: what it is, and how its values are read.

Nothing is read until it is asked for, and then one matrix of a stack at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from headstart.checkpoint.quantized.weights import QuantizedWeight
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import as_bytes, load, one_thread
from headstart.errors import BrokenFile

if TYPE_CHECKING:
    import torch

_NO_NUMBER = 255  # among exponents
_ROWS = 128  # dequantised at a time: a whole number of blocks
# Rows [start, stop) of a matrix, in a form that the engine computes with, else in fp32.
Rows = Callable[[int, int], "QuantizedWeight | torch.Tensor"]


@dataclass(frozen=True)
class StoredWeight:
    """A quantised weight, found and checked by its shapes, not yet read."""

    name: str  # of the weight, as it would be called unquantised
    shape: tuple[int, ...]  # of the weight, [..., N, K]
    # fp8-row, fp8-block, int4-group or int8-group; `values` where no form of the engine has it
    form: str
    words: str  # how it is stored, for people
    tensors: tuple[str, ...]  # all that it is read from
    matrix: Callable[[int], Rows]  # opens one of a stack, or the only one
    num_groups: int = 1  # of a row, for integers
    scale_dtype: str = "F32"
    num_bytes: int = 0  # of all that it is read from

    @property
    def stack(self) -> int:
        """How many matrices it is."""
        return prod(self.shape[:-2])

    def quantized(self, number: int = 0) -> QuantizedWeight:
        """One whole matrix in the form that `form` names."""
        found = self.matrix(number)(0, self.shape[-2])
        assert isinstance(found, QuantizedWeight)
        return found

    def values(self, dtype: torch.dtype, number: int = 0) -> torch.Tensor:
        """One whole matrix, dequantised; its rows are made a few at a time."""
        import torch

        rows, columns = self.shape[-2:]
        result = torch.empty(rows, columns, dtype=dtype)
        at = 0
        for part in self._parts(number):
            result[at : at + len(part)] = part.to(dtype)
            at += len(part)
        return result

    def source(self) -> TensorSource:
        """The weight in BF16, to be written; the exact product is rounded once."""

        def pieces() -> Iterator[memoryview]:
            import torch

            with one_thread():
                for number in range(self.stack):
                    for part in self._parts(number):
                        yield as_bytes(part.to(torch.bfloat16))

        return TensorSource("BF16", self.shape, pieces, is_copy=False)

    def _parts(self, number: int) -> Iterator[torch.Tensor]:
        """Rows of one matrix in fp32, a few at a time."""
        import torch

        read, count = self.matrix(number), self.shape[-2]
        for start in range(0, count, _ROWS):
            part = read(start, min(start + _ROWS, count))
            if isinstance(part, QuantizedWeight):
                part = part.dequantized(torch.float32)
            yield part


def load_scales(name: str, source: TensorSource) -> torch.Tensor:
    """Scales as they are stored; BrokenFile where one of them is no number."""
    import torch

    scales = load(source)
    if not scales.numel():
        raise BrokenFile(f"{name} is empty; expected scales. Download the checkpoint again.")
    if scales.dtype == torch.uint8:  # exponents of two, of which the last means no number
        is_number = scales != _NO_NUMBER
    else:
        is_number = torch.isfinite(scales.to(torch.float32))
    if not is_number.all():
        raise BrokenFile(
            f"{name} holds a scale that is no finite number, so that its weights would all become "
            "NaN. Download the checkpoint again."
        )
    return scales
