"""The rows of an LM head that a draft vocabulary names, on one rank of tensor parallelism.

Rows are a copy, made once and refilled in place (captured graphs keep their address): V' x hidden
values beside the LM head. Row i of a rank is token `ids[i]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from headstart.errors import ConfigError

_COLUMNS = 256  # of a quantised LM head that are read at once
_LARGEST = 127  # of the integers of eight bits


class DraftRows:
    """One LM head's part of a draft vocabulary; `ids` None stands for all of its tokens."""

    def __init__(self, head: Any, ids: Sequence[int] | None, *, is_int8: bool, dtype: torch.dtype):
        self._head, self._dtype = head, dtype
        first, end = own_range(head)
        listed = range(first, end) if ids is None else [i for i in ids if first <= i < end]
        self.ids = torch.tensor(list(listed), dtype=torch.int64, device=_device(head))
        self._local = self.ids - first
        self.weight = self._read()
        self.int8 = int8_rows(self.weight) if is_int8 else None

    def refill(self) -> None:
        """Take the LM head's values again, after it was given new ones."""
        self.weight.copy_(self._read())
        if self.int8 is not None:
            for kept, new in zip(self.int8, int8_rows(self.weight), strict=True):
                kept.copy_(new)

    def scores(self, hidden: Tensor) -> Tensor:
        """[rows, V'] of this rank."""
        return linear(hidden.to(self.weight.dtype), self.weight)

    def top_ids(self, hidden: Tensor) -> Tensor | None:
        """The best token of each row from the int8 rows; None where no kernel of ours takes it."""
        if self.int8 is None or not hidden.is_cuda or not len(self.ids):
            return None
        from headstart.backends.cuda.kernels.int8_choice import chooser_for

        hidden = hidden.contiguous()
        choose = chooser_for(hidden)
        if choose is None:
            return None
        # An inverse temperature of 0 is the plain arg-max: no noise, so no seeds.
        zeros = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        return choose(hidden, *self.int8, zeros.float(), zeros, zeros, self.ids)

    def _read(self) -> Tensor:
        return rows_of(self._head, self._local, self._dtype).to(self._dtype).contiguous()


def own_range(head: Any) -> tuple[int, int]:
    """The token ids whose rows this rank holds: from, and up to but without."""
    indices = head.shard_indices
    return int(indices.org_vocab_start_index), int(indices.org_vocab_end_index)


def rows_of(head: Any, local: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of an LM head by their number on this rank, as plain values.

    A quantised one has no such rows: its own product with the identity gives them.
    """
    weight = getattr(head, "weight", None)
    if isinstance(weight, Tensor) and weight.is_floating_point() and weight.itemsize > 1:
        return weight.detach().index_select(0, local)
    width, method = getattr(head, "embedding_dim", None), getattr(head, "quant_method", None)
    if not isinstance(width, int) or method is None or not hasattr(method, "apply"):
        raise ConfigError(
            f"the LM head ({type(head).__name__}) has no rows that a draft vocabulary could be "
            "taken from, and no product of its own. Leave the LM head unquantised, or draft "
            "without a vocabulary."
        )
    eye = torch.eye(width, dtype=dtype, device=local.device)
    starts = range(0, width, _COLUMNS)
    parts = [method.apply(head, eye[at : at + _COLUMNS]).index_select(1, local) for at in starts]
    return torch.cat(parts).t()


def int8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in int8, and one scale for each."""
    values = rows.float()
    scales = (values.abs().amax(dim=1) / _LARGEST).clamp_min(1e-12)
    return (values / scales[:, None]).round().to(torch.int8), scales


def _device(head: Any) -> torch.device:
    first: Tensor = next(iter([*head.parameters(), *head.buffers()]))
    return first.device
