"""What every weight format with kernels of its own offers.

M rows, N outputs, K inputs, S splits.
"""

from __future__ import annotations

from torch import Tensor

from headstart.backends.cuda.kernels.choice import choose_logits
from headstart.backends.cuda.kernels.eight_bits import Fp8Rows, IntegerRows
from headstart.backends.cuda.kernels.rows import silu_product
from headstart.backends.cuda.kernels.wide_groups import PartedRows
from headstart.models.linear import Linear

Rounded = Fp8Rows | IntegerRows | PartedRows  # rows as kernels of a format read them


class KernelLinear(Linear):
    """x W^T by kernels of a weight format; a bias is left to what adds partial sums up."""

    def forward(self, x: Tensor) -> Tensor:
        if not len(x):  # a pass over the middle of a prompt wants no logits
            return x.new_empty(0, self.weight.shape[0])
        y = self.whole(x)
        return y if self.bias is None else y + self.bias

    def partial(self, x: Tensor | Rounded) -> Tensor:
        """[S, M, N], whose sum over S is x W^T."""
        raise NotImplementedError

    def whole(self, x: Tensor) -> Tensor:
        """x W^T [M, N] in x's type."""
        raise NotImplementedError

    def gated(self, x: Tensor | Rounded) -> Tensor:
        """silu(x G^T) * (x U^T) [M, N / 2] in the model's type; W holds G's rows, then U's."""
        assert isinstance(x, Tensor)
        return silu_product(self.whole(x))

    def gated_for(self, x: Tensor | Rounded, down: KernelLinear) -> Tensor | Rounded:
        """The same as `down` takes it, rounded already where kernels do that on the way."""
        return self.gated(x)

    def choose(
        self, x: Tensor, inv_temps: Tensor, seeds: Tensor, positions: Tensor,
        token_ids: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Token ids [M] that this LM head and the noise choose."""
        return choose_logits(self.whole(x), inv_temps, seeds, positions, token_ids)
