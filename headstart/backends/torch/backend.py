"""The reference backend: the plain modules in PyTorch, on any device, for every model that runs.

On a CPU its products are tuned at start; with `exact` the trunk runs in blocks of a constant
number of rows (`backends/torch/exact.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from headstart.backends.base import BackendOptions
from headstart.backends.flat import FlatBackend
from headstart.backends.numba.compiler import why_missing
from headstart.backends.numba.support import why_not_whole
from headstart.backends.options import Weights
from headstart.backends.results import CacheSizes
from headstart.backends.rows import HeadBatch, TrunkBatch
from headstart.backends.torch.exact import BLOCK_ROWS, ExactContext, OneRow, fill_up, make_exact
from headstart.backends.torch.paged_memory import PagedMemory
from headstart.backends.torch.threads import measure_threads
from headstart.backends.torch.tuning import tune
from headstart.backends.weights import (
    PLAIN_FORMS,
    Int8Linear,
    WeightFormat,
    beside_layers,
    convert_trunk,
    convert_weights,
)
from headstart.models.attention import LayerCache, PagedContext
from headstart.models.build import LoadedModel
from headstart.models.layers import LayerContext
from headstart.models.mtp import MTPHead
from headstart.models.quantized import QuantizedLinear, QuantizedStack
from headstart.models.recurrence import LayerStates, Recurrence, SlotRecurrence, first_rows
from headstart.sampling.choose import choose
from headstart.sampling.params import Row


class TorchBackend(FlatBackend):
    name = "torch"
    why_slow = "plain modules run, which the host drives"

    def __init__(self, model: LoadedModel, options: BackendOptions):
        super().__init__(model, options)
        self.chooses_one_by_one = options.exact
        modules = [module for module in (self.trunk, self.head) if module is not None]
        if options.kv_dtype == "fp8":
            own = str(self.dtype).removeprefix("torch.")
            self.notes.append(
                f"K/V are rounded to 8-bit floats and held as {own}: the text that a GPU's would "
                "give, none of the memory"
            )
        self._head_form: WeightFormat | None = None  # where it is not that of the model
        if self.device.type == "cpu" and not options.exact:
            self._convert(options.weights)
        # Products in int8 give a row the same bits alone and among others; so should attention.
        self._lone_rows = isinstance(self.trunk.lm_head, Int8Linear)
        if self.device.type == "cpu":
            if options.threads is None:
                self.notes += measure_threads(self.trunk, is_tuned=not options.exact)
            if options.exact:
                make_exact(self.trunk)
            tune(*(modules[1:] if options.exact else modules))

    def _convert(self, weights: Weights) -> None:
        """Products of other formats by the compiled kernels, where this machine has them."""
        modules = [module for module in (self.trunk, self.head) if module is not None]
        each = (m for module in modules for m in module.modules())
        is_stored = any(isinstance(m, QuantizedLinear | QuantizedStack) for m in each)
        if weights == "as-dtype" and (self.options.kernels == "off" or not is_stored):
            return
        forms: Mapping[str, WeightFormat] = PLAIN_FORMS
        if self.options.kernels != "off":
            reason = why_missing()
            if reason is None:
                from headstart.backends.numba.weight_formats import PRODUCTS

                forms, reason = PRODUCTS, why_not_whole(self.model)
            kind = "8-bit and 4-bit" if weights == "as-dtype" else weights
            self.notes.append(f"{kind} kernels compute no whole layers here: {reason}")
        self._head_form = forms[beside_layers(weights)]
        convert_trunk(self.trunk, forms, weights)
        if self.head is not None:
            self.hold_head(self.head)

    def hold_head(self, head: MTPHead) -> None:
        if self._head_form is not None:
            convert_weights(head, self._head_form)

    def _allocate(self, sizes: CacheSizes) -> None:
        kv: Literal["plain", "rounded"] = "plain" if self.options.kv_dtype != "fp8" else "rounded"
        self.memory = PagedMemory.allocate(self.model, sizes, kv)

    def _run_trunk(self, batch: TrunkBatch) -> tuple[Tensor, Tensor, Tensor]:
        if self.options.exact:
            return self._run_blocks(batch)
        short = first_rows(batch.state_spans)
        starts = self.to_device(short) if short else None
        stream = self.trunk(
            self.to_device(batch.ids),
            self.to_device(batch.positions),
            self._contexts(
                lambda cache: PagedContext(cache, batch.spans, self._lone_rows),
                lambda own: SlotRecurrence(own, batch.state_spans, starts=starts),
            ),
        )
        normed = self.trunk.final_norm(stream)
        rows = normed if len(batch.logits) == len(batch.ids) else normed[batch.logits]
        return stream, normed, self.trunk.logits(rows)

    def _run_blocks(self, batch: TrunkBatch) -> tuple[Tensor, Tensor, Tensor]:
        """The same in blocks of constant size, so that no row's bits depend on their number."""
        lone = [part for span in batch.spans for part in span.by_row()]
        one_rows = [OneRow(part.first_slot, part.context) for part in lone]
        streams, normeds, logits = [], [], []
        for start in range(0, len(batch.ids), BLOCK_ROWS):
            part = slice(start, start + BLOCK_ROWS)
            count, rows_here = len(batch.ids[part]), one_rows[part]
            # The slot after the last row may hold what the next block of rows goes on from.
            cut = (
                own.between(part.start, part.stop, own.keeps[-1][1]) for own in batch.state_spans
            )
            spans_here = [own for own in cut if own is not None]
            stream = self.trunk(
                self.to_device(fill_up(batch.ids[part])),
                self.to_device(fill_up(batch.positions[part])),
                self._contexts(
                    partial(ExactContext, rows=rows_here),
                    partial(SlotRecurrence, spans=spans_here, one_by_one=True),
                ),
            )
            normed = self.trunk.final_norm(stream)
            rows = [row - start for row in batch.logits if start <= row < start + count]
            if rows:
                logits.append(self.trunk.logits(normed)[rows])
            streams.append(stream[:count])
            normeds.append(normed[:count])
        none = logits or [self.trunk.logits(normeds[0][:0])]
        return torch.cat(streams), torch.cat(normeds), torch.cat(none)

    def logits(self, normed: Tensor) -> Tensor:
        """With `exact` in blocks of constant size, as in a pass."""
        if not self.options.exact:
            return super().logits(normed)
        parts = []
        for block in normed.split(BLOCK_ROWS):
            missing = BLOCK_ROWS - len(block)
            full = torch.cat([block, block[-1:].expand(missing, -1)]) if missing else block
            parts.append(self.trunk.logits(full)[: len(block)])
        return torch.cat(parts)

    def _contexts(
        self,
        attend: Callable[[LayerCache], LayerContext],
        recur: Callable[[LayerStates], Recurrence],
    ) -> list[LayerContext]:
        """One for every layer: what its rows see, or the states that they go on from."""
        caches, states = iter(self.memory.trunk), iter(self.memory.states)
        return [
            recur(next(states)) if kind.is_recurrent
            else attend(next(caches)) if kind.attends else None
            for kind in self.config.layers
        ]  # fmt: skip

    def _run_head(self, module: int, batch: HeadBatch) -> tuple[Tensor, Tensor]:
        assert self.head is not None
        context = PagedContext(self.memory.head[module], batch.spans)
        embedded = self.trunk.embed[batch.ids]
        normed, recycled = self.head.modules_[module](
            embedded, batch.hidden, batch.positions, self.trunk.rotary, context
        )
        return normed, recycled

    def choose(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        if not self.chooses_one_by_one:
            return super().choose(logits, rows)
        return [int(choose(logits[i : i + 1].clone(), [row])) for i, row in enumerate(rows)]
