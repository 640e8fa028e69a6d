"""The runner of int8 weights on a CPU with the compiled kernels: the same two passes."""

from __future__ import annotations

import time
from typing import Any

import torch

from headstart.cpu.compiler import kept_in
from headstart.cpu.forward import HeadKernels, TrunkKernels, seats_of
from headstart.engine.runner import Runner
from headstart.models.attention import Span
from headstart.models.mtp import MTPModule
from headstart.models.recurrence import StateSpan
from headstart.models.trunk import Trunk


class CpuRunner(Runner):
    """All rows, those of prompts too, get bits that depend on the tokens before them alone."""

    def __init__(self, trunk: Trunk, *parts: Any, **sizes: Any):
        super().__init__(trunk, *parts, **sizes)
        self._caches, self._head_caches = [], []  # the kernels have memory of their own
        slots = len(self._boundary) * self.block_size
        self._kernels = TrunkKernels(trunk, slots)
        modules = [] if self.head is None else list(self.head.modules_)
        self._modules = [
            HeadKernels(module, trunk, slots) for module in modules if isinstance(module, MTPModule)
        ]
        self.note = self._warm_up()

    @torch.inference_mode()
    def _warm_up(self) -> str:
        """Compile, or load what was compiled, before the first request waits for it."""
        started = time.perf_counter()
        blank = [Span(0, 1, slice(0, 1), slice(0, 1))]  # K/V memory is scratch before it
        _, normed, _ = self._run_rows([0], [0], blank, [0], [])
        for module in range(len(self._modules)):
            self._run_module(module, self._numbers([0]), normed, self._numbers([0]), blank)
        seconds = time.perf_counter() - started
        return f"int8 kernels: ready after {seconds:.1f} s (compiled once, kept in {kept_in()})"

    def _run_rows(
        self,
        ids: list[int],
        positions: list[int],
        spans: list[Span],
        wanted: list[int],
        states: list[StateSpan],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        stream, normed = self._kernels.run(self._numbers(ids), seats_of(spans, positions))
        rows = normed if len(wanted) == len(ids) else normed[wanted]
        return stream, normed, self.trunk_model.logits(rows)

    def _run_module(
        self, module: int, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor,
        spans: list[Span],
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        return self._modules[module].run(ids, hidden, seats_of(spans, positions.tolist()))
