"""What a backend is: weights in a form of its own, K/V memory, both forward passes, choices.

The plain modules of `models/` in `backends/torch` are the reference; every other backend is held to
them by tests/integration/test_backends.py. An engine knows a backend by this file alone, and
`backends/select.py` decides which one runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from headstart.backends.chooser import Chooser
from headstart.backends.draft_lm_heads import DraftVocabRows, LmHead, own_lm_head
from headstart.backends.head_swap import PreparedHead, SwapsHead
from headstart.backends.host import available_bytes
from headstart.backends.options import BackendOptions, Weights
from headstart.backends.results import CacheSizes, DeviceBytes, DraftChain, HeadOutput
from headstart.backends.rounds import (
    DeviceRounds,
    Emitted,
    GivenCopy,
    HeadStates,
    Launched,
    RoundMasks,
    RoundRequest,
    RoundSizes,
    RoundTiming,
    SizeTimes,
)
from headstart.backends.rows import (
    HeadRows,
    StateRows,
    TrunkOutput,
    TrunkRows,
    blank_tokens,
    on_device,
)
from headstart.backends.scores import RowScores
from headstart.backends.working_memory import (
    WorkingBytes,
    WorkSizes,
    context_bytes,
    pass_bytes,
)
from headstart.models.build import LoadedModel
from headstart.models.config import LayerKind, ModelConfig
from headstart.sampling.params import Row
from headstart.vocab.own_tokens import OwnTokens

# All that an engine needs to know of backends.
__all__ = [
    "Backend", "BackendOptions", "CacheSizes", "Chooser", "DeviceBytes", "DeviceRounds",
    "DraftChain", "Emitted", "GivenCopy", "HeadOutput", "HeadRows", "HeadStates", "Launched",
    "LoadedModel", "PreparedHead", "RoundMasks", "RoundRequest", "RoundSizes", "RoundTiming",
    "RowScores", "SizeTimes", "StateRows", "TrunkOutput", "TrunkRows", "Weights", "WorkSizes",
    "WorkingBytes", "blank_tokens",
]  # fmt: skip


class Backend(Chooser, SwapsHead, ABC):
    """Runs one model on one device."""

    name: ClassVar[str]
    has_rounds = False  # whether it can run decoding rounds by itself: see `make_rounds`
    drafts_chains = False  # whether `draft_chain` makes drafts of all depths at once
    why_slow: ClassVar[str | None] = None  # why requests outside of rounds are not at full speed

    def __init__(self, model: LoadedModel, options: BackendOptions):
        self.model, self.options = model, options
        self.config, self.trunk, self.head = model.config, model.trunk, model.head
        self.device, self.dtype = model.device, model.dtype
        self.notes: list[str] = []  # about how it computes, for people
        self.draft_vocabs: dict[str, DraftVocabRows] = {}

    @property
    def num_modules(self) -> int:
        return self.head.num_modules if self.head is not None else 0

    @property
    def is_parallel(self) -> bool:
        """Whether every module of the head is fed with the trunk's state."""
        return self.head is not None and self.head.layout.topology == "parallel"

    # Memory

    def allocate(self, sizes: CacheSizes) -> None:
        """Take the memory of all requests, before the first pass; forgets draft vocabularies."""
        self.sizes = sizes
        self.draft_vocabs.clear()
        # Per block and module the state that the slot after the block needs.
        self._boundary = torch.zeros(
            sizes.num_blocks, self.num_modules, self._state_size, dtype=self.dtype,
            device=self.device,
        )  # fmt: skip
        self._allocate(sizes)

    @abstractmethod
    def _allocate(self, sizes: CacheSizes) -> None:
        """K/V of trunk and head, and recurrent states."""

    def block_bytes(self, block_size: int) -> int:
        """K/V of a block in every layer of trunk and head, and the states kept beside it."""
        token = sum(self.slot_bytes(self.config, kind) for kind in self.config.layers)
        states = 0
        if self.head is not None:
            own = self.head.config
            token += self.num_modules * self.slot_bytes(own, own.head_layer)
            states = self.num_modules * self._state_size * self.dtype.itemsize
        return token * block_size + states

    def slot_bytes(self, config: ModelConfig, kind: LayerKind) -> int:
        """What a layer keeps of a token."""
        return config.slot_values(kind) * self.dtype.itemsize

    def state_bytes(self) -> int:
        """One request's states in every recurrent layer; 0 where a model has none."""
        own, wide = self.config.recurrent, max(self.dtype.itemsize, 4)
        if own is None:
            return 0
        layer = own.conv_values * self.dtype.itemsize + own.memory_values * wide
        more = (each for kind in self.config.layers for each in self.config.more_states(kind))
        further = sum(rows * channels for rows, channels in more) * self.dtype.itemsize
        return self.config.num_recurrent * layer + further

    def round_bytes(self, sizes: RoundSizes) -> int:
        """What one request in device rounds keeps of recurrent layers beside its states."""
        return 0

    def working_bytes(self, sizes: WorkSizes) -> WorkingBytes:
        """What is still to be taken beside weights, K/V and states; on a CPU it is not planned."""
        if self.device.type == "cpu":
            return WorkingBytes()
        context = context_bytes(self.model, self.model.max_len)
        return pass_bytes(self.model, sizes) + WorkingBytes(context)

    def device_bytes(self) -> DeviceBytes:
        if self.device.type != "cuda":
            free = available_bytes()
            return DeviceBytes(free, free)
        torch.cuda.empty_cache()  # what is kept to be used again counts as free
        return DeviceBytes(*torch.cuda.mem_get_info(self.device))

    # Forward passes

    @abstractmethod
    def trunk_pass(self, requests: Sequence[TrunkRows]) -> TrunkOutput:
        """Run all rows; per request the states that feed its head, and all wanted logits."""

    def score(self, states: Tensor, tokens: Sequence[int], top: int) -> RowScores:
        """Log-probabilities of the tokens behind rows of a trunk pass, and of the `top` best.

        `states` are what the pass gave for these rows: a few of them, since all logits are made.
        """
        normed = self.trunk.final_norm(states) if self.feeds_stream else states
        logits, ids = self.logits(normed), self.to_device(tokens)
        return RowScores.of_rows(logits, ids, top, one_by_one=self.chooses_one_by_one)

    def logits(self, normed: Tensor) -> Tensor:
        """The trunk's, of states after the final norm."""
        return self.trunk.logits(normed)

    @property
    def feeds_stream(self) -> bool:
        """Whether the head is fed with what comes before the final norm."""
        return self.head is not None and self.head.layout.trunk_hidden != "after_final_norm"

    @property
    def _state_size(self) -> int:
        """Numbers in what the head is fed for a row."""
        return 0 if self.head is None else self.config.state_size(self.head.layout)

    @abstractmethod
    def head_pass(self, module: int, requests: Sequence[HeadRows]) -> HeadOutput:
        """Run one module of the head over all rows."""

    def fill_head(self, module: int, requests: Sequence[HeadRows]) -> None:
        """The same where only the module's K/V is wanted, not what it would say."""
        self.head_pass(module, requests)

    def to_device(self, values: Sequence[int]) -> Tensor:
        return on_device(values, self.device)

    # Drafts

    def draft_logits(self, normed: Tensor, vocab: str | None, module: int = 0) -> Tensor:
        """Logits for drafting, over the whole vocabulary or a reduced one."""
        lm_head = self._lm_head(module)
        if vocab is None and lm_head is self.trunk.lm_head:
            return self.trunk.logits(normed)
        result = (lm_head if vocab is None else self.draft_vocabs[vocab].lm_heads[module])(normed)
        assert isinstance(result, Tensor)
        return result if result.dtype == torch.float64 else result.float()

    def with_own(
        self, logits: Tensor, vocab: str, normed: Tensor, own: OwnTokens, module: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Logits [1, n] of a row for drafting, and the ids of their columns, in rising order.

        Those of a vocabulary, which are given, and those of the request's own tokens.
        """
        added = self._own_logits(normed, vocab, own, module).to(logits.dtype)
        ids, order = torch.cat([self.draft_vocabs[vocab].ids, self.to_device(own.ids)]).sort()
        return torch.cat([logits, added], dim=1)[:, order], ids

    def _own_logits(self, normed: Tensor, vocab: str, own: OwnTokens, module: int) -> Tensor:
        """[n, tokens] by slot."""
        return self.token_logits(normed, self.to_device(own.ids), module)

    def token_logits(self, normed: Tensor, ids: Tensor, module: int = 0) -> Tensor:
        """Logits for drafting of some tokens [n, ids], as a request's own tokens have them."""
        result = self._lm_head(module).only_rows(ids)(normed)
        assert isinstance(result, Tensor)
        return result

    def draft_chain(
        self, requests: Sequence[HeadRows], counts: Sequence[int], rows: Sequence[Row],
        vocab: str | None, own: Sequence[OwnTokens | None] = (),
    ) -> list[DraftChain]:  # fmt: skip
        """Drafts of each request, `counts` many, most first; heads of one module only.

        `rows` say how each request's first draft is chosen; the next ones come after it. A mask
        holds for the first draft alone: the grammar has to say which of the others fit. `own`: of
        each request the tokens that it drafts beside the vocabulary; empty where none has any.
        """
        raise NotImplementedError(f"{self.name} drafts one depth at a time")

    def _lm_head(self, module: int) -> LmHead:
        """The module's own where it has one, else the trunk's."""
        own = own_lm_head(self.head, module) if self.head is not None else None
        return self.trunk.lm_head if own is None else own

    def add_draft_vocab(self, name: str, ids: Sequence[int]) -> None:
        """Let requests draft from these tokens alone."""
        chosen = torch.tensor(sorted(set(ids)), device=self.device)
        heads = [self._lm_head(module) for module in range(self.num_modules)]
        made = {id(head): head.only_rows(chosen) for head in heads}  # once, where they share it
        self.draft_vocabs[name] = DraftVocabRows(chosen, tuple(made[id(head)] for head in heads))

    # States at ends of blocks, from which a prefix hit goes on

    def save_boundaries(self, blocks: list[int], module: int, states: Tensor) -> None:
        """Keep, for each block, the state [n, hidden] that the slot after it needs."""
        self._boundary[self.to_device(blocks), module] = states

    def boundary(self, block: int) -> Tensor:
        """[modules, hidden]."""
        return self._boundary[block]

    # Rounds on the device

    def make_rounds(self, sizes: RoundSizes) -> DeviceRounds:
        """Decoding rounds that run ahead of the host, where `has_rounds`."""
        raise NotImplementedError(f"{self.name} runs no rounds by itself")
