"""The delta rule over prompts by flash-linear-attention, where that gives our numbers.

It takes all texts of a pass in one call; our own chunks take a few dozen launches for every 64 rows
of every text. It is tried once at the start. Whatever it raises later ends its use, and our chunks
compute what it was asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import normalize

from headstart.backends.rows import on_device
from headstart.errors import first_line
from headstart.models.delta_config import DeltaConfig
from headstart.models.delta_rule import CHUNK_ROWS, DeltaRows, Scan, scan_texts

NAME = "flash-linear-attention"
_MODULE = "fla.ops.gated_delta_rule"
_ITS_CHUNK_ROWS = 64
_LEAST_CHUNKS = 2  # of ours; for less a call is not worth it
_TRIED = (600, 37, 300)  # rows of texts: several chunks, less than one, and one begun
_TOLERANCE = 0.04  # of a norm: rounding to bf16 makes 0.01, decays to another base 0.15
_LOG = logging.getLogger(__name__)


@dataclass
class FlaScan:
    """A `Scan` by the library's `rule`, which gets q, k and v in `dtype`."""

    rule: Callable[..., tuple[Tensor, Tensor]]
    dtype: torch.dtype
    trouble: str | None = None  # what it failed with; it is not asked again

    def __call__(
        self, texts: Sequence[DeltaRows], memories: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        chunks = sum(-(-rows.num_rows // CHUNK_ROWS) for rows in texts)
        if self.trouble is None and chunks >= _LEAST_CHUNKS:
            try:
                return self.run(texts, memories)
            except torch.OutOfMemoryError:  # ours needs less room
                pass
            except Exception as error:  # compilers and libraries raise what they like
                self.trouble = first_line(error)
                _LOG.warning("%s is not used any more for prompts: %s", NAME, self.trouble)
        return scan_texts(texts, memories)

    def run(
        self, texts: Sequence[DeltaRows], memories: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """All texts in one call. Our queries and keys are of unit length and scaled already."""
        lengths = tuple(rows.num_rows for rows in texts)
        edges, chunks = _edges(lengths, memories[0].device)
        results, after = self.rule(
            q=_joined([rows.q.to(self.dtype) for rows in texts]),
            k=_joined([rows.k.to(self.dtype) for rows in texts]),
            v=_joined([rows.v.to(self.dtype) for rows in texts]),
            g=_joined([rows.log_decay for rows in texts]),
            beta=_joined([rows.strength for rows in texts]),
            scale=1.0,
            initial_state=torch.stack(list(memories)),
            output_final_state=True,
            cu_seqlens=edges,
            chunk_indices=chunks,
        )
        return list(zip(torch.split(results[0], list(lengths)), after.unbind(), strict=True))


def choose_scan(config: DeltaConfig, dtype: torch.dtype, device: torch.device) -> tuple[Scan, str]:
    """How the recurrent layers of a model read prompts on this device, and what to say about it."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return scan_texts, ""
    return try_library(config, dtype, device)


def try_library(config: DeltaConfig, dtype: torch.dtype, device: torch.device) -> tuple[Scan, str]:
    """The same where the library could be used."""
    try:
        library = FlaScan(import_module(_MODULE).chunk_gated_delta_rule, dtype)
        trouble = why_unusable(library, config, device)
    except ModuleNotFoundError as error:
        trouble = "it is not installed" if error.name == "fla" else first_line(error)
    except Exception as error:  # made for another torch or Triton, most likely
        trouble = first_line(error)
    if trouble is None:
        return library, f"recurrent layers read prompts by {NAME}"
    return scan_texts, f"recurrent layers read prompts in plain PyTorch, not by {NAME}: {trouble}"


@torch.inference_mode()
def why_unusable(library: FlaScan, config: DeltaConfig, device: torch.device) -> str | None:
    """By how much it differs from our own chunks; None if it does not.

    The library tunes and compiles itself for these heads here, not when requests wait.
    """
    draw = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=device)

    keys, values = (config.v_heads, config.k_dim), (config.v_heads, config.v_dim)
    texts = [
        DeltaRows(
            normalize(normal(rows, *keys), dim=-1) * config.k_dim**-0.5,
            normalize(normal(rows, *keys), dim=-1),
            normal(rows, *values),
            -(2 * normal(rows, config.v_heads) - 3).exp(),
            normal(rows, config.v_heads).sigmoid(),
        )
        for rows in _TRIED
    ]
    memories = [normal(config.v_heads, config.k_dim, config.v_dim) for _ in texts]
    found, wanted = library.run(texts, memories), scan_texts(texts, memories)
    for ours, theirs in zip(wanted, found, strict=True):
        for name, own, other in zip(("results", "memories"), ours, theirs, strict=True):
            gap = float((other - own).norm() / own.norm())
            if not gap < _TOLERANCE:
                return f"its {name} differ by {gap:.2g} of their norm"
    return None


@lru_cache(64)
@torch.inference_mode(False)
def _edges(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where texts begin and end, and (text, chunk of it) of all chunks [n, 2].

    Once, not in every layer: the library caches what it derives from a tensor by the tensor's
    identity, and would otherwise fetch the lengths from the device to count chunks.
    """
    chunks = [
        number
        for text, length in enumerate(lengths)
        for chunk in range(-(-length // _ITS_CHUNK_ROWS))
        for number in (text, chunk)
    ]
    edges = on_device([0, *accumulate(lengths)], device)
    return edges, on_device(chunks, device).view(-1, 2)


def _joined(parts: list[Tensor]) -> Tensor:
    """[1, T, ...]: rows of all texts, as one batch of the library."""
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)
