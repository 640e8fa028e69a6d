"""What a draft was given, kept by the slot of the KV cache: target states, and the tokens after.

A draft's first pass of a round has the target's state of each position and the token behind it; the
passes after it have the head's own states at positions further on, which the next round's first
pass overwrites, as it does for tokens that were rejected. So a slot holds what belongs to the text
as soon as the text has gone on for a round, and it holds it as long as the KV cache does: prompts
that share a prefix share these, too. All of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headstart.errors import ConfigError


class StateTable:
    """One row for each slot, and one more that takes what belongs to none."""

    def __init__(self, layers: frozenset[str]):
        self._layers = layers  # of the draft's attention, any of which names its slots
        self._num_slots: int | None = None
        self._seen: Tensor | None = None  # no rows, of the states' width, dtype and device
        self.states = self.next_ids = self.positions = torch.empty(0)

    @property
    def layers(self) -> frozenset[str]:
        return self._layers

    def open(self, num_slots: int) -> None:
        """The KV cache has so many slots.

        Rows are like the states of a profiling pass, which comes before. Where there was none they
        are made at the first pass, which must not be captured: each replay would clear them.
        """
        self._num_slots = num_slots
        if self._seen is not None:
            self._make(self._seen)

    def record(self, ids: Tensor, positions: Tensor, states: Tensor) -> None:
        """A pass of the draft: tokens [rows], their positions and states [rows, width]."""
        if self._seen is None:
            self._seen = states.new_empty(0, states.shape[-1])
        slots = self._slots()
        if slots is None or self._num_slots is None:
            return  # a profiling pass: there is no KV cache yet
        if not len(self.states):
            self._make(states)
        rows = min(len(slots), len(states))
        at = slots[:rows].long()
        at = torch.where(at < 0, self._num_slots, at)  # padding has no slot
        if positions.dim() > 1:  # of text, images' axes are all the same
            positions = positions[0]
        self.states.index_copy_(0, at, states[:rows])
        self.next_ids.index_copy_(0, at, ids[:rows].int())
        self.positions.index_copy_(0, at, positions[:rows].int())

    def num_bytes(self, count: int) -> int:
        """Of so many rows."""
        kept = (self.states, self.next_ids, self.positions)
        return count * sum(one[:1].numel() * one.element_size() for one in kept)

    def rows(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """States, following tokens and positions of slots: copies, on the same device."""
        at = slots.to(self.states.device)
        return self.states[at], self.next_ids[at], self.positions[at]

    def _slots(self) -> Tensor | None:
        from vllm.forward_context import get_forward_context, is_forward_context_available

        if not is_forward_context_available():
            return None
        found = get_forward_context().slot_mapping
        if not isinstance(found, dict):
            return None  # of batches that are cut in two
        return next((found[name] for name in found if name in self._layers), None)

    def _make(self, states: Tensor) -> None:
        assert self._num_slots is not None
        rows, where = self._num_slots + 1, states.device
        self.states = torch.zeros(rows, states.shape[-1], dtype=states.dtype, device=where)
        self.next_ids = torch.zeros(rows, dtype=torch.int32, device=where)
        self.positions = torch.full((rows,), -1, dtype=torch.int32, device=where)


def table_of(draft: nn.Module) -> StateTable:
    """An empty table for a draft's own attention layers."""
    names = {getattr(module, "layer_name", None) for module in draft.modules()}
    layers = frozenset(name for name in names if isinstance(name, str))
    if not layers:
        raise ConfigError(
            f"vLLM's {type(draft).__name__} has no attention layer whose slots could be followed; "
            "its states cannot be collected. Serve without `collect`."
        )
    return StateTable(layers)


def open_table(draft: Any, kv_cache_config: Any) -> tuple[int, int]:
    """Fit a draft's table to the KV cache: the number of its group, and tokens in a block."""
    table: StateTable = draft.headstart_table
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        if table.layers & set(group.layer_names):
            size = int(group.kv_cache_spec.block_size)
            table.open(int(kv_cache_config.num_blocks) * size)
            return number, size
    raise ConfigError(
        f"vLLM keeps no KV cache for {', '.join(sorted(table.layers))}; states cannot be "
        "collected. Serve without `collect`."
    )
