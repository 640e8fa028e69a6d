"""What the tests of swapped heads share: one model with two heads, of which one agrees less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headstart.backends.base import PreparedHead
from headstart.backends.torch.backend import TorchBackend
from headstart.engine.engine import Engine
from headstart.sampling.acceptance import Acceptance
from headstart.sampling.params import SamplingParams
from support.engine_runs import checkpoint, soft
from support.head_edits import edited, export, head_names
from support.tiny_fixture import Tiny


@dataclass(frozen=True)
class Heads:
    """A checkpoint with its good head, the same with a weak one, and both heads by themselves."""

    model: Path
    weak_model: Path
    good: Path
    weak: Path


def heads_of(folder: Path) -> Heads:
    """Every tensor of the weak head differs: one that were not copied would show in drafts."""
    weak_model = folder.parent / f"{folder.name}-weak"
    found = Heads(
        folder, weak_model, *(folder.parent / f"{folder.name}-{n}-head" for n in ("good", "weak"))
    )
    if weak_model.exists():
        return found
    names = set(head_names(folder).values())

    def weaken(own: dict[str, torch.Tensor]) -> None:
        draw = torch.Generator().manual_seed(3)
        for name in sorted(names & set(own)):
            values = own[name]
            noise = torch.randn(values.shape, generator=draw) * 3 * values.float().abs().mean()
            own[name] = (values.float() + noise).to(values.dtype)

    edited(folder, weak_model, change=weaken)
    export(folder, "headstart", found.good)
    export(weak_model, "headstart", found.weak)
    return found


def two_heads(tiny: Tiny, family: str = "mimo", **changes: Any) -> Heads:
    return heads_of(checkpoint(tiny, family, **changes))


def two_soft_heads(tiny: Tiny, family: str = "mimo", **changes: Any) -> Heads:
    return heads_of(soft(tiny, family, **changes))


def answered(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams],
    swaps: Sequence[Path | PreparedHead] = (), every: int = 3,
) -> list[list[int]]:  # fmt: skip
    """Texts of all prompts together, with the next head of `swaps` after every few steps."""
    ids = [engine.add(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    left, steps = list(swaps), 0
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
        steps += 1
        if left and steps % every == 0:
            engine.swap_head(left.pop(0))
    assert not left, f"{len(left)} swaps were left after {steps} steps"
    assert engine.pool.num_used == 0
    return [engine.collect(name).outputs[0].token_ids for name in ids]


def acceptance(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[Acceptance]:
    """Of each answer, where nothing is found in a cache."""
    engine.pool.drop_cache()
    results = engine.generate(list(prompts), list(params))
    return [result.stats.acceptance for result in results]


def bits_of(engine: Engine) -> dict[str, bytes]:
    """Every tensor of the trunk and of the running head, as bytes."""
    parts = {"trunk": engine.model.trunk, "head": engine.model.head}
    return {
        f"{part}.{name}": value.detach().contiguous().view(torch.uint8).numpy().tobytes()
        for part, module in parts.items()
        if module is not None
        for name, value in module.state_dict().items()
        if value.numel() and value.dim()
    }


def is_plain(engine: Engine) -> bool:
    return isinstance(engine.backend, TorchBackend)
