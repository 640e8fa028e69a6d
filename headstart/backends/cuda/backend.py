"""A GPU with the fused kernels: ragged passes over prompts, and whole rounds captured as graphs.

With `exact` nothing is chosen by the number of rows (`backends/cuda/exact.py`): every logit of the
trunk comes from one product, and every row is chosen in one way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from headstart.backends.base import BackendOptions
from headstart.backends.chooser import RowLogprobs
from headstart.backends.cuda.draft_weights import DraftWeights, whole_rows
from headstart.backends.cuda.exact import ExactKernels
from headstart.backends.cuda.exact_recurrent import exact_prompt_recur
from headstart.backends.cuda.forward import Kernels, Recur, Rows
from headstart.backends.cuda.group_linear import copied_bytes
from headstart.backends.cuda.kernels.logprobs import MAX_LOGPROBS
from headstart.backends.cuda.libraries import Library, choose_library
from headstart.backends.cuda.packed import captured_rows
from headstart.backends.cuda.prompts import exact_rows, filling_rows, latent_rows, ragged_rows
from headstart.backends.cuda.quantized_experts import hold_all
from headstart.backends.cuda.recurrent import RecurrentBatch
from headstart.backends.cuda.recurrent_prompts import plain_recur, prompt_recur, why_plain
from headstart.backends.cuda.round_model import DraftTokens, RoundModel
from headstart.backends.cuda.sampling import choose_rows, logprobs_of_rows
from headstart.backends.cuda.sparse_prompts import index_bytes
from headstart.backends.cuda.working_memory import captured_bytes
from headstart.backends.draft_lm_heads import LmHead
from headstart.backends.flat import FlatBackend
from headstart.backends.results import CacheSizes
from headstart.backends.rounds import DeviceRounds, RoundSizes
from headstart.backends.rows import HeadBatch, TrunkBatch
from headstart.backends.torch.paged_memory import PagedMemory
from headstart.backends.working_memory import (
    WorkingBytes,
    WorkSizes,
    context_bytes,
    pass_bytes,
)
from headstart.models.attention import MAX_GATHERED_SLOTS, Span
from headstart.models.build import LoadedModel
from headstart.models.config import LayerKind, ModelConfig
from headstart.models.kv_fp8 import SIZE_BYTES
from headstart.models.mtp import MTPHead
from headstart.models.recurrence import StateSpan
from headstart.sampling.params import Row


class CudaBackend(FlatBackend):
    """A model by fused kernels on a GPU, prompts by passes and decoding in captured rounds."""

    name = "cuda"
    has_rounds = True

    def __init__(self, model: LoadedModel, options: BackendOptions):
        super().__init__(model, options)
        self.chooses_one_by_one = options.exact
        for module in (self.trunk, self.head):
            if module is not None:
                self.notes += hold_all(module, to_fp8=options.weights == "fp8")
        self._draft_weights = DraftWeights(model, options)
        if self._has_fp8_kv:
            self.notes.append("K/V are 8-bit floats with a scale per token and head")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what was replaced counts as free memory
        self.kernels = Kernels()
        self._library: Library | None = None  # for the attention of long prompts
        self.reads_states_plainly = False  # recurrent layers, in prompts
        if options.exact:
            self.kernels = ExactKernels(self.config.max_positions)
        else:
            self._choose_library()

    def _choose_library(self) -> None:
        config = self.config
        if config.mla is None and config.v_dim == config.head_dim:
            self._library = choose_library(
                config.num_heads, config.num_kv_heads, config.head_dim, self.dtype, self.device
            )
        if self._library is not None:
            self.notes.append(f"long prompts attend by {self._library.name}")
        if config.delta is not None:
            reason = why_plain(config.delta, self.dtype, self.device)
            self.reads_states_plainly = reason is not None
            if reason is not None:
                self.notes.append(f"recurrent layers read prompts in plain PyTorch: {reason}")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what was tried with counts as free memory

    # Another head in place of the running one

    def hold_head(self, head: MTPHead) -> None:
        hold_all(head, to_fp8=self.options.weights == "fp8")
        self._draft_weights.copy_new_head(head)

    def hold_draft_rows(self, running: LmHead, new: LmHead) -> None:
        self._draft_weights.copy_new_rows(running, new)

    def head_swapped(self) -> None:
        self._draft_weights.ids_changed()

    # Memory

    def _allocate(self, sizes: CacheSizes) -> None:
        kv: Literal["plain", "fp8"] = "fp8" if self._has_fp8_kv else "plain"
        self.memory = PagedMemory.allocate(self.model, sizes, kv, index_apart=True)
        self._draft_weights.clear()

    @property
    def _has_fp8_kv(self) -> bool:
        return self.options.kv_dtype == "fp8"

    def slot_bytes(self, config: ModelConfig, kind: LayerKind) -> int:
        if not self._has_fp8_kv or kind.mixer == "delta":
            return super().slot_bytes(config, kind)
        heads = sum(shape[0] for shape in config.kept(kind))
        return config.slot_values(kind) + heads * SIZE_BYTES

    def round_bytes(self, sizes: RoundSizes) -> int:
        one = replace(sizes, max_requests=1)
        batch = self._recurrent_batch(one, torch.device("meta"))
        return 0 if batch is None else batch.num_bytes

    def working_bytes(self, sizes: WorkSizes) -> WorkingBytes:
        if self.device.type == "cpu":
            return WorkingBytes()
        context = 0 if self.options.exact else context_bytes(self.model, MAX_GATHERED_SLOTS)
        copies = self._draft_weights.copy_bytes(sizes.vocab_tokens)
        for module in (self.trunk, self.head):
            if module is not None:  # of a pass by itself, and of one that is captured
                copies += 2 * copied_bytes(module, self.dtype)
        if self.config.mla is not None and self.config.mla.index is not None:
            top_k = self.config.mla.index.top_k
            context += index_bytes(self.model.max_len, sizes.max_rows, top_k)
        passes = pass_bytes(self.model, sizes) + WorkingBytes(context + copies)
        return passes + captured_bytes(self.model, sizes, joins=self.joins_prompts)

    @property
    def joins_prompts(self) -> bool:
        """Whether rows of prompts join rounds.

        Rows that depend on no others, and layers that attend to latents or go on from states, have
        passes of their own.
        """
        return not self.options.exact and self.config.mla is None and self.config.delta is None

    # Forward passes

    def _run_trunk(self, batch: TrunkBatch) -> tuple[Tensor, Tensor, Tensor]:
        rows = self._trunk_rows(batch.spans, self.to_device(batch.positions))
        if self.memory.states:
            rows = replace(rows, recur=self._recur(batch.state_spans))
        kept, chosen = None, batch.logits
        if not self.options.exact and len(batch.wanted) < len(batch.ids):
            kept = self.to_device(batch.wanted or [0])  # a kernel wants a row at least
            chosen = batch.logits_among
        stream, normed = self.kernels.trunk(
            self.trunk, self.to_device(batch.ids), rows, self.memory.trunk, kept
        )
        wanted = normed if len(chosen) == len(normed) else normed[self.to_device(chosen)]
        return stream, normed, self.logits(wanted)

    def _recur(self, spans: Sequence[StateSpan]) -> Recur:
        if isinstance(self.kernels, ExactKernels):
            return exact_prompt_recur(self.kernels, self.memory.states, spans)
        if self.reads_states_plainly:
            return plain_recur(self.memory.states, spans)
        return prompt_recur(self.kernels, self.memory.states, spans)

    def _trunk_rows(self, spans: list[Span], positions: Tensor) -> Rows:
        if isinstance(self.kernels, ExactKernels):
            return exact_rows(spans, positions, self.kernels, self.sizes.block_size)
        return self._ragged_rows(spans, positions)

    def _ragged_rows(self, spans: list[Span], positions: Tensor) -> Rows:
        if self.config.mla is not None:
            index = self.config.mla.index
            return latent_rows(spans, positions, None if index is None else index.top_k)
        return ragged_rows(spans, positions, self._library)

    def logits(self, normed: Tensor) -> Tensor:
        """The trunk's, of states after the final norm."""
        if isinstance(self.kernels, ExactKernels):
            return self.kernels.whole(normed, self.trunk.lm_head)
        return self.trunk.logits(normed)

    def _run_head(self, module: int, batch: HeadBatch) -> tuple[Tensor, Tensor]:
        assert self.head is not None
        return self.kernels.head(
            self.head.module(module + 1), batch.ids[:, None], batch.hidden[:, None],
            self._ragged_rows(batch.spans, batch.positions), self.trunk.embed,
            self.trunk.rotary, self.memory.head[module],
        )  # fmt: skip

    def _fill_head(self, module: int, batch: HeadBatch) -> None:
        """With blank rows up to a size that was tried at the start: libraries load by size."""
        assert self.head is not None
        rows = filling_rows(batch.spans, batch.positions)
        missing = captured_rows(len(batch.ids), self.device) - len(batch.ids)
        rows = replace(
            rows, positions=pad(rows.positions, (0, missing)),
            kv_slots=pad(rows.kv_slots, (0, missing), value=-1),
        )  # fmt: skip
        self.kernels.fill_head(
            self.head.module(module + 1), pad(batch.ids, (0, missing))[:, None],
            pad(batch.hidden, (0, 0, 0, missing))[:, None], rows, self.trunk.embed,
            self.trunk.rotary, self.memory.head[module],
        )  # fmt: skip

    def choose(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        """By the kernels of rounds, whose noise equals the reference's up to rounding only.

        A request may decode in rounds now and with the host when memory runs short.
        """
        return [int(token) for token in choose_rows(logits, rows).tokens.tolist()]

    def logprobs(
        self, logits: Tensor, at: Sequence[int], ids: Sequence[int], rows: Sequence[Row]
    ) -> list[RowLogprobs]:
        tops = [min(row.params.logprobs or 0, logits.shape[1]) for row in rows]
        if max(tops) > MAX_LOGPROBS:
            return super().logprobs(logits, at, ids, rows)
        found = logprobs_of_rows(logits[self.to_device(at)], ids, rows)
        values, names = (part.tolist() for part in found)
        return [
            (own, dict(zip(row_names[:top], others[:top], strict=True)))
            for (own, *others), row_names, top in zip(values, names, tops, strict=True)
        ]

    # Rounds

    def make_rounds(self, sizes: RoundSizes) -> DeviceRounds:
        from headstart.backends.cuda.device_rounds import CapturedRounds

        if sizes.own and not whole_rows(self._lm_heads()):
            self.notes.append(
                "requests in rounds draft from their draft vocabulary alone: single rows of a "
                "quantised LM head cannot be read"
            )
            sizes = replace(sizes, own=0)
        return CapturedRounds(self, sizes, self._recurrent_batch(sizes, self.device))

    def round_model(self, max_context: int) -> RoundModel:
        """What a captured round runs; `draft_tokens` come beside it."""
        self._draft_weights.copy_head()
        return RoundModel(
            trunk=self.trunk, head=self.head, caches=self.memory.trunk,
            head_caches=self.memory.head, boundary=self._boundary,
            block_size=self.sizes.block_size, drafting=[], max_context=max_context,
            feeds_stream=self.feeds_stream, kernels=self.kernels, states=self.memory.states,
            own_rows=whole_rows(self._lm_heads()),
        )  # fmt: skip

    def draft_tokens(self, vocab: str | None) -> DraftTokens:
        """What drafts of a round are chosen among: a vocabulary, or all tokens."""
        if vocab is not None:
            known = self.draft_vocabs[vocab]
            return self._draft_weights.tokens(known.lm_heads, known.ids)
        return self._draft_weights.tokens(self._lm_heads() or [self._lm_head(0)], None)

    def _lm_heads(self) -> list[LmHead]:
        """Whole ones, by module of the head."""
        return [self._lm_head(module) for module in range(self.num_modules)]

    def _recurrent_batch(self, sizes: RoundSizes, device: torch.device) -> RecurrentBatch | None:
        """What requests in rounds have of recurrent layers, where the model has any."""
        delta = self.config.delta
        if delta is None:
            return None
        return RecurrentBatch.create(
            delta, self.config.num_recurrent, sizes.max_requests, sizes.max_drafts, self.dtype,
            device,
        )  # fmt: skip
