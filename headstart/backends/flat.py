"""A backend whose passes take the rows of all requests as one flat batch of tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from headstart.backends.base import Backend
from headstart.backends.results import HeadOutput
from headstart.backends.rows import HeadBatch, HeadRows, TrunkBatch, TrunkOutput, TrunkRows


class FlatBackend(Backend):
    """Lays rows out flat, and gives each request its part of what comes out."""

    def trunk_pass(self, requests: Sequence[TrunkRows]) -> TrunkOutput:
        batch = TrunkBatch.of(requests, self.sizes.block_size, self.to_device)
        stream, normed, logits = self._run_trunk(batch)
        return batch.by_request(stream if self.feeds_stream else normed), logits

    @abstractmethod
    def _run_trunk(self, batch: TrunkBatch) -> tuple[Tensor, Tensor, Tensor]:
        """States before and after the final norm, of all rows or of `batch.wanted`; logits."""

    def head_pass(self, module: int, requests: Sequence[HeadRows]) -> HeadOutput:
        batch = self._head_batch(module, requests)
        normed, recycled = self._run_head(module, batch)
        return HeadOutput(normed, recycled, [span.stop - 1 for span in batch.spans])

    @abstractmethod
    def _run_head(self, module: int, batch: HeadBatch) -> tuple[Tensor, Tensor]:
        """States for the LM head, and those that feed the next depth."""

    def fill_head(self, module: int, requests: Sequence[HeadRows]) -> None:
        self._fill_head(module, self._head_batch(module, requests))

    def _fill_head(self, module: int, batch: HeadBatch) -> None:
        self._run_head(module, batch)

    def _head_batch(self, module: int, requests: Sequence[HeadRows]) -> HeadBatch:
        return HeadBatch.of(module, requests, self.sizes.block_size, self.to_device)
