"""An embedding of the last tokens that a layer adds to the residual streams (per-layer embedding).

N-grams that end with a row's token are hashed into a table. What is found there gives one value,
which each stream takes as far as its own row asks for it, and a short convolution with gaps over
the last rows. An end of text hides what comes before it.

The tokens and values of the rows before a batch come from states of the layer (`Recurrence`).
Tokens are kept as digits, which every type of numbers holds exactly; 0 stands for no token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from headstart.errors import BadConfig, UnsupportedFamily
from headstart.families.dims import positive_ints
from headstart.families.ngrams import head_sizes, multipliers, table_rows
from headstart.models.gated_streams import StreamNorm
from headstart.models.linear import Linear
from headstart.models.recurrence import Recurrence
from headstart.models.streams import StreamConfig

_SIZES = (
    "ple_embed_dim", "ple_conv_kernel_size", "ngram_size", "heads_per_ngram",
    "ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by",
)  # fmt: skip
_VALUES, _TOKENS = 1, 2  # states of the layer beside that of its mixer
_DIGIT, _NUM_DIGITS = 256, 3
_TINY = 1e-6  # the least that a root is taken of, as published


@dataclass(frozen=True, kw_only=True)
class NgramConfig:
    size: int  # of the longest n-gram
    dim: int  # of all heads together
    kernel: int  # values that the convolution sees, each `size` rows after the last
    head_sizes: tuple[int, ...]
    multipliers: tuple[int, ...]
    rows: int  # of the table
    end_id: int  # the token that ends a text

    @property
    def stored(self) -> dict[str, list[int]]:
        """What follows from the rest, and some files hold, by its published name."""
        firsts = [sum(self.head_sizes[:head]) for head in range(len(self.head_sizes))]
        return {
            "layer_multipliers": list(self.multipliers),
            "ngram_heads_vocab_sizes": list(self.head_sizes),
            "ngram_heads_offsets": firsts,
        }

    def kept(self, width: int) -> tuple[tuple[int, int], ...]:
        """Rows and channels of the states that a layer keeps for it; `width` of all streams."""
        return ((self.kernel - 1) * self.size, width), (
            self.size - 1,
            _NUM_DIGITS * (self.size - 1),
        )


def ngram_config(raw: Mapping[str, Any]) -> NgramConfig | None:
    """The embedding of a config, None where there is none."""
    layers = raw.get("ple_layer_ids") or []
    if not layers:
        return None
    if len(set(layers)) > 1:
        raise UnsupportedFamily(
            f"ple_layer_ids is {layers}; the engine computes one layer with an embedding of "
            "several tokens, as releases have it."
        )
    sizes, end = positive_ints(raw, _SIZES), raw.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    heads = 0 if sizes is None else (sizes[2] - 1) * sizes[3]
    if (
        sizes is None
        or heads < 1
        or sizes[0] % heads
        or type(end) is not int
        or type(raw.get("seed")) is not int
    ):
        found = ", ".join(repr(raw.get(name)) for name in (*_SIZES, "seed", "eos_token_id"))
        raise BadConfig(
            f"{', '.join(_SIZES)}, seed and eos_token_id are {found}; expected whole numbers, "
            "sizes above 0, n-grams of at least 2 tokens, a size that all heads share, and an end "
            "of text. Take the config.json of the model's release."
        )
    return NgramConfig(
        size=sizes[2],
        dim=sizes[0],
        kernel=sizes[1],
        head_sizes=tuple(head_sizes(raw)),
        multipliers=tuple(multipliers(raw)),
        rows=table_rows(raw),
        end_id=end,
    )


class NgramEmbedding(nn.Module):
    def __init__(self, config: NgramConfig, streams: StreamConfig, hidden: int):
        super().__init__()
        self.config, self.count, self.hidden = config, streams.count, hidden
        width = streams.count * hidden
        self.table = nn.Parameter(
            torch.empty(config.rows, config.dim // len(config.head_sizes)), requires_grad=False
        )
        self.key = Linear(config.dim, width)
        self.value = Linear(config.dim, hidden)
        self.key_norm, self.query_norm, self.value_norm = (
            StreamNorm(streams.count, hidden, streams.norm_eps) for _ in "kqv"
        )
        self.conv = nn.Parameter(torch.empty(width, 1, config.kernel), requires_grad=False)

    def forward(self, x: Tensor, ids: Tensor, context: Recurrence) -> Tensor:
        """x [T, S * hidden], ids [T] -> what is added to x."""
        found = self.table[self._places(self._tokens(ids, context, x.dtype))].flatten(1)
        shape = (len(x), self.count, self.hidden)
        keys, asked = self.key_norm(self.key(found)).view(shape), self.query_norm(x).view(shape)
        match = (keys * asked).sum(dim=-1, keepdim=True) / self.hidden**0.5
        share = (match.abs().clamp_min(_TINY).sqrt() * match.sign()).sigmoid()
        values = (share * self.value(found).unsqueeze(1)).flatten(1)
        seen = context.convolve(self.value_norm(values), self._with_gaps(), _VALUES)
        result = values + silu(seen)
        assert isinstance(result, Tensor)
        return result

    def _with_gaps(self) -> Tensor:
        """The convolution's weights [width, rows that it reaches back + 1], zero between."""
        size, kernel = self.config.size, self.config.kernel
        wide = self.conv.new_zeros(len(self.conv), (kernel - 1) * size + 1)
        wide[:, ::size] = self.conv.squeeze(1)
        return wide

    def _tokens(self, ids: Tensor, context: Recurrence, dtype: torch.dtype) -> list[Tensor]:
        """Each row's token and the ones before it [T], the end of text in place of hidden ones."""
        powers = _DIGIT ** torch.arange(_NUM_DIGITS, device=ids.device)
        size, end = self.config.size, self.config.end_id
        digits = (ids[:, None] // powers % _DIGIT + 1).to(dtype)
        # A state is read and written once in a pass, so there are digits for every way back.
        weight = torch.eye(size, dtype=dtype, device=ids.device)[:-1].flip(0)
        weight = weight.repeat_interleave(_NUM_DIGITS, dim=0)
        rows = context.convolve(digits.repeat(1, size - 1), weight, _TOKENS).round().long()
        result = [ids]
        for back, before in enumerate(rows.split(_NUM_DIGITS, dim=1), 1):
            token = ((before - 1) * powers).sum(dim=1)
            is_there = before[:, 0] > 0
            if back > 1:  # else the row's own token, which hides nothing
                is_there &= result[-1] != end
            result.append(torch.where(is_there, token, end))
        return result

    def _places(self, tokens: list[Tensor]) -> Tensor:
        """Rows of the table [T, heads], by head."""
        config = self.config
        sizes = torch.tensor(config.head_sizes, device=tokens[0].device)
        firsts = sizes.cumsum(0) - sizes
        each = len(sizes) // (config.size - 1)
        mixed, parts = tokens[0] * config.multipliers[0], []
        for place in range(1, config.size):
            mixed = mixed ^ (tokens[place] * config.multipliers[place])
            own = slice((place - 1) * each, place * each)
            parts.append(mixed[:, None] % sizes[own] + firsts[own])
        return torch.cat(parts, dim=1)
