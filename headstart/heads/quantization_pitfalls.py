"""What engines make of a head beside a quantised trunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headstart.checkpoint.header import TensorInfo
from headstart.checkpoint.quantized.described import quantization_of
from headstart.checkpoint.quantized.names import is_quantized, is_scale, stale_scales
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import BadConfig, some
from headstart.heads.detection import FoundHead
from headstart.heads.ignore_lists import is_listed, lookups
from headstart.heads.operation import counted
from headstart.heads.schemes import has_four_bits


def quantization_pitfalls(
    checkpoint: Checkpoint, head: FoundHead, infos: dict[str, TensorInfo]
) -> Iterator[str]:
    stale = stale_scales(infos)
    if stale:
        names = [infos[name].name for name in stale]
        yield (
            f"{len(stale)} scales stand beside weights that are not quantised ({some(names)}): "
            "the weights were replaced without them. Stitch the head again to remove them."
        )
    fusions = [i.name for n, i in infos.items() if ".fuse." in n and is_quantized(n, i)]
    if fusions:
        yield (
            f"the fusion projection is quantised ({some(fusions)}); most of vLLM's MTP classes "
            "build it unquantised and read such bytes as plain ones (vllm-project/vllm#48492). "
            "`headstart stitch` with --dequantize writes it plain."
        )
    quantization = quantization_of(checkpoint)
    four_bit = [i.name for n, i in infos.items() if has_four_bits(n, i, quantization)]
    if four_bit:
        yield (
            f"{counted(len(four_bit), 'head weight')} with four bits ({some(four_bit)}); such "
            "heads were reported to lose all acceptance where eight bits kept it. Restore the "
            "original head."
        )
    if not quantization:
        return
    plain = [
        name.removesuffix(".weight")
        for name, info in infos.items()
        if name.endswith("_proj.weight")
        and not is_scale(name)
        and not is_quantized(name, info)
        and ".block." in name
    ]
    try:
        yield from _unlisted(head, quantization, plain)
    except BadConfig as error:  # a pattern that is not understood here may be fine for engines
        yield f"whether the head's modules are excluded is not known: {error}"


def _unlisted(head: FoundHead, quantization: dict[str, Any], plain: list[str]) -> Iterator[str]:
    """Plain modules of the head that engines would build as quantised."""
    asked = lookups(head.family, head.naming, plain) if plain else []
    unlisted = [name for name in asked if not is_listed(quantization, name)]
    if unlisted and len(unlisted) == len(asked):
        yield (
            "the head is not quantised but the model is, and the quantisation config does not "
            f"exclude the head's modules ({some(unlisted, 2)}): engines build them as quantised, "
            "skip the weights and accept nothing. `headstart stitch` writes the list."
        )
        return
    asked = lookups(head.family, head.naming, plain, "vllm") if plain else []
    if asked and not any(is_listed(quantization, name) for name in asked):
        yield (
            "the quantisation config excludes the head under checkpoint names only; vLLM asks for "
            f"{some(asked, 2)}, builds them as quantised and accepts nothing. `headstart stitch` "
            "writes both names."
        )
