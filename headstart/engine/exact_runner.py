"""The runner of `exact` on a GPU: the same kernels in the same shapes, whatever else is run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headstart.backends.cuda.exact import ExactKernels
from headstart.backends.cuda.forward import Rows
from headstart.backends.cuda.prompts import exact_rows
from headstart.engine.device_runner import DeviceRunner
from headstart.engine.seatable import needs_only_noise
from headstart.models.attention import Span
from headstart.models.trunk import Trunk
from headstart.sampling.choose import choose
from headstart.sampling.rows import Row


class ExactRunner(DeviceRunner):
    """Every logit of the trunk comes from one product, and every row is chosen in one way."""

    kernels: ExactKernels
    keeps_bits = True

    def __init__(self, trunk: Trunk, *parts: Any, **sizes: Any):
        super().__init__(trunk, *parts, **sizes)
        self.kernels = ExactKernels(trunk.config.max_positions)
        self.chooser = self._choose_rows

    def _rows(self, spans: list[Span], positions: torch.Tensor) -> Rows:
        return exact_rows(spans, positions, self.kernels, self.block_size)

    def _logits(self, normed: torch.Tensor) -> torch.Tensor:
        return self.kernels.whole(normed, self.trunk_model.lm_head)

    def _choose_rows(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
        """Rows that a round could have chosen are chosen as there, the others one by one.

        A request may decode on the device now and with the host when memory runs short: the noise
        of both is equal up to rounding only.
        """
        as_in_rounds = [
            i for i, row in enumerate(rows) if row.mask is None and needs_only_noise(row.params)
        ]
        found: dict[int, int] = {}
        if as_in_rounds:
            own = [rows[i] for i in as_in_rounds]
            chosen = self._draw(
                logits[as_in_rounds], [row.params for row in own], [row.seed for row in own],
                [row.position for row in own],
            )  # fmt: skip
            found = dict(zip(as_in_rounds, chosen.tolist(), strict=True))
        for i in set(range(len(rows))) - set(found):
            # Twice: for a single row libraries take other ways to add up.
            found[i] = int(choose(logits[[i, i]], [rows[i], rows[i]])[0])
        return [found[i] for i in range(len(rows))]
