"""What a head's matrices get as input while it drafts from states that the trunk really makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headstart.models.feed_forward import Experts
from headstart.models.linear import Linear
from headstart.models.mtp import MTPHead
from headstart.models.trunk import Trunk
from headstart.simulate.matches import unrolled
from headstart.simulate.scoring import Read

LM_HEAD = "lm_head"  # where the inputs of the LM head are kept


class Moments:
    """By path of a head's module, the sum of x x^T over its inputs x."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.num_rows = 0

    def add(self, path: str, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1]).float()
        found = rows.T @ rows
        self.sums[path] = self.sums[path] + found if path in self.sums else found

    def of(self, parameter: str) -> Tensor | None:
        """Of the matrix that a parameter of the head is; None where it was not seen."""
        return self.sums.get(parameter.removesuffix(".weight"))


@torch.inference_mode()
def draft_inputs(head: MTPHead, trunk: Trunk, read: Iterable[Read], depths: int) -> Moments:
    """Inputs of every matrix at depths 1 to `depths`, from every row of what was read.

    Experts of a layer are taken together: what all of them get is what each one is rounded for.
    """
    moments = Moments()
    with _watched(head, moments):
        for _, batch in read:
            for said in unrolled(head, trunk.embed, trunk.rotary, batch, depths):
                moments.add(LM_HEAD, said)
            moments.num_rows += len(batch.ids)
    return moments


@contextmanager
def _watched(head: nn.Module, moments: Moments) -> Iterator[None]:
    """While inside, products of the head leave their inputs in `moments`."""

    def watch(path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, given: moments.add(path, given[0])

    hooks = []
    for path, module in head.named_modules():
        if isinstance(module, Linear):
            hooks.append(module.register_forward_pre_hook(watch(path)))
        elif isinstance(module, Experts):
            hooks.append(module.register_forward_pre_hook(watch(f"{path}.gate_up")))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
