"""The runner of a GPU: the same two passes through fused kernels, and captured rounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headstart.engine.request import Request
from headstart.engine.runner import Runner
from headstart.gpu.forward import Kernels
from headstart.gpu.prompts import ragged_rows
from headstart.gpu.rounds import Model
from headstart.gpu.seats import signed
from headstart.gpu.transfer import on_device
from headstart.kernels.choice import choose_truncated
from headstart.models.attention import Span
from headstart.models.linear import Linear


class DeviceRunner(Runner):
    """Ragged batches through the kernels; `model` is what captured rounds need."""

    kernels = Kernels()

    def _run_rows(
        self, ids: list[int], positions: list[int], spans: list[Span], wanted: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = ragged_rows(spans, self._numbers(positions))
        tokens = self._numbers(ids)
        stream, normed = self.kernels.trunk(self.trunk_model, tokens, rows, self._caches)
        chosen = normed if len(wanted) == len(ids) else normed[self._numbers(wanted)]
        return stream, normed, self.trunk_model.logits(chosen)

    def _numbers(self, values: Sequence[int]) -> torch.Tensor:
        return on_device(values, self.device)

    def choose_first(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        """[n] first tokens of requests that need nothing but logits and noise; nobody waits."""
        heat = [1 / r.params.temperature if r.params.temperature > 0 else 0.0 for r in requests]

        def floats(values: Sequence[float]) -> torch.Tensor:
            return on_device(values, self.device, torch.float32)

        return choose_truncated(
            logits, floats(heat),
            self._numbers([signed(r.seed) for r in requests]),
            self._numbers([len(r.tokens) for r in requests]),
            self._numbers([max(0, r.params.top_k) for r in requests]),
            floats([r.params.top_p for r in requests]), floats([r.params.min_p for r in requests]),
        )  # fmt: skip

    def round_model(self, max_context: int, draft_vocab: str | None) -> Model:
        """What a captured round runs; drafts come from one vocabulary, or from all tokens."""
        lm_head, ids = self.trunk_model.lm_head, None
        if draft_vocab is not None:
            vocab = self.draft_vocabs[draft_vocab]
            assert isinstance(vocab.lm_head, Linear)  # kernels run with no others
            lm_head, ids = vocab.lm_head, vocab.ids
        return Model(
            trunk=self.trunk_model, head=self.head, caches=self._caches,
            head_cache=self._head_caches[0] if self.head is not None else None,
            boundary=self._boundary[:, 0] if self.head is not None else self._boundary.flatten(1),
            block_size=self.block_size, draft_lm_head=lm_head, draft_ids=ids,
            max_context=max_context, kernels=self.kernels,
        )  # fmt: skip
