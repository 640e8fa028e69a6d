"""Memory that computing takes on a GPU beside weights, K/V and states, by formulas.

They are rather too large than too small, and not precise: nothing is measured, and part of a device
is left free in any case (`memory_fraction`).
"""

from __future__ import annotations

from dataclasses import dataclass

from headstart.backends.rounds import RoundSizes
from headstart.models.build import LoadedModel
from headstart.models.linear import Linear
from headstart.models.mla_config import MOST_UNFOLDED

RESERVE = 1 << 30  # workspaces of libraries, and what a process needs on the device for itself
# Of a row at once: what a layer's widest product gives and what is made of it, and as much again
# where a recurrent layer scans chunks; as wide as the model, stream, norms and states of the head.
_PRODUCTS, _SCANNED_PRODUCTS, _STATES = 2, 4, 6
# Rows of logits as they come and in fp32, their processed copy, that of log-probabilities or of a
# sort, and two that hold what requests ask for.
_HOST_CHOICE = 6


@dataclass(frozen=True)
class WorkingBytes:
    """So much at any time, and so much for each request that may run."""

    fixed: int = 0
    per_request: int = 0

    def of(self, requests: int) -> int:
        return self.fixed + requests * self.per_request

    def __add__(self, other: WorkingBytes) -> WorkingBytes:
        return WorkingBytes(self.fixed + other.fixed, self.per_request + other.per_request)


@dataclass(frozen=True, kw_only=True)
class WorkSizes:
    """What passes and rounds are made for."""

    rounds: RoundSizes
    block_size: int
    max_rows: int  # in one pass
    vocab_tokens: int = 0  # of all draft vocabularies together


def pass_bytes(model: LoadedModel, sizes: WorkSizes) -> WorkingBytes:
    """Of passes that the host drives, with what was copied before them."""
    config = model.config
    rows = sizes.rounds.num_drafts + 1  # whose tokens are chosen, of each request
    vocab_rows = sizes.vocab_tokens * config.hidden * model.dtype.itemsize  # of the LM head
    return WorkingBytes(
        fixed=RESERVE + activation_bytes(model, sizes.max_rows) + vocab_rows,
        per_request=_HOST_CHOICE * logit_bytes(model, rows),
    )


def context_bytes(model: LoadedModel, max_tokens: int) -> int:
    """K/V of one context gathered in a layer, and once more where it is filled up for a library.

    Or what latents are unfolded to, for which no library is asked.
    """
    config, mla = model.config, model.config.mla
    tokens = min(model.max_len, max_tokens)
    gathered = filled = tokens * max(config.slot_values(kind) for kind in config.layers)
    if mla is not None:
        whole = model.max_len * config.num_heads * (mla.nope_dim + mla.v_dim)
        filled = min(MOST_UNFOLDED, whole)
    return (gathered + filled) * model.dtype.itemsize


def logit_bytes(model: LoadedModel, rows: int) -> int:
    """One array of logits in fp32 at least."""
    return rows * model.config.vocab * max(4, model.dtype.itemsize)


def activation_bytes(model: LoadedModel, rows: int) -> int:
    """Of so many rows in one layer; what the layer before took is free by then."""
    config, moe = model.config, model.config.moe
    itemsize, products = model.dtype.itemsize, _PRODUCTS
    if config.recurrent is not None:  # such layers compute in fp32
        itemsize, products = max(4, itemsize), _SCANNED_PRODUCTS
    result = rows * (products * _widest_product(model) + _STATES * config.hidden) * itemsize
    if moe is not None:  # every choice of a row leaves a term as wide as the model
        result += rows * (moe.top_k + 1) * (config.hidden + 2 * moe.width) * 4
    return result


def _widest_product(model: LoadedModel) -> int:
    """Outputs of the widest matrix, LM heads aside."""
    modules = [part for part in (model.trunk, model.head) if part is not None]
    widths = (
        layer.weight.shape[0]
        for module in modules
        for name, layer in module.named_modules()
        if isinstance(layer, Linear) and not name.endswith("lm_head")
    )
    return max(widths, default=model.config.hidden)
