"""Whether one head can take the place of another that runs, and which tensor goes where.

Both are held against each other module by module: first as they are computed (sizes, norms,
windows), without memory, then as a backend holds them (kinds of matrices, shapes, types). What
differs is refused by name before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headstart.errors import ShapeMismatch
from headstart.models.config import ModelConfig
from headstart.models.mtp import MTPHead
from headstart.models.norm import Norm


def check_same_geometry(running: MTPHead, new: MTPHead, folder: Path) -> None:
    """ShapeMismatch unless a head without memory computes as the running one does."""
    with torch.device("meta"):
        like = MTPHead(running.config, running.layout, running.num_modules)
    found = _first_difference(like, new)
    if found is not None:
        raise ShapeMismatch(
            f"{folder} cannot take the place of the head that runs: {found}. Give a head of the "
            "same model, made as the running one was."
        )


def _first_difference(running: MTPHead, new: MTPHead) -> str | None:
    if running.num_modules != new.num_modules:
        return f"it has {new.num_modules} modules, the running one {running.num_modules}"
    if running.layout != new.layout:
        return f"it is fed and fused as {new.layout}, the running one as {running.layout}"
    ropes = running.config.rope_of_head, new.config.rope_of_head
    if ropes[0] != ropes[1]:
        return f"it rotates positions by {ropes[1]}, the running one by {ropes[0]}"
    for name, old, other in _side_by_side(running, new):
        if old is None or other is None or type(old) is not type(other):
            return f"{name} is {_kind(other)}, of the running one {_kind(old)}"
        facts, others = _facts(old), _facts(other)
        for fact in facts:
            if facts[fact] != others.get(fact):
                return f"{name} has {fact} {others.get(fact)}, of the running one {facts[fact]}"
    return None


def _side_by_side(
    running: nn.Module, new: nn.Module
) -> Iterator[tuple[str, nn.Module | None, nn.Module | None]]:
    """Modules by path; None where one side has none."""
    sides = [dict(side.named_modules(remove_duplicate=False)) for side in (running, new)]
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        yield name, sides[0].get(name), sides[1].get(name)


def _kind(module: nn.Module | None) -> str:
    return "missing" if module is None else type(module).__name__


def _facts(module: nn.Module) -> dict[str, Any]:
    """What a module without memory computes by: numbers and settings, and shapes of its tensors."""
    settings = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModelConfig)
    }
    return settings | {name: tuple(value.shape) for name, value in _tensors(module).items()}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """All that a module itself holds: parameters, buffers, and what is computed of them once."""
    held = {**module._parameters, **module._buffers, **vars(module)}
    return {name: value for name, value in held.items() if isinstance(value, Tensor)}


def _numbers(module: nn.Module) -> dict[str, int]:
    """Numbers that say how its tensors are laid out; no tensor holds them."""
    return {
        name: value for name, value in vars(module).items()
        if isinstance(value, int) and not name.startswith("_") and name != "training"
    }  # fmt: skip


def matched(running: nn.Module, new: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Every tensor of a running part, and the one to be written there; ShapeMismatch if none fits.

    Both are in the form that a backend computes with.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    for name, old, other in _side_by_side(running, new):
        if old is None or other is None or type(old) is not type(other):
            raise _other_form(name, _kind(old), _kind(other))
        if isinstance(other, Norm) and isinstance(old, Norm):
            _ = old.factor, other.factor  # made when it is first asked for
        for key, number in _numbers(old).items():
            if (given := _numbers(other).get(key)) != number:
                raise _other_form(f"{name}.{key}", str(number), str(given))
        held = _tensors(old)
        for key, value in held.items():
            found = getattr(other, key, None)
            if not isinstance(found, Tensor):
                raise _other_form(f"{name}.{key}", _words(value), "missing")
            if (found.shape, found.dtype) != (value.shape, value.dtype):
                raise _other_form(f"{name}.{key}", _words(value), _words(found))
            pairs.append((value, found))
        more = [key for key in _tensors(other) if key not in held]
        if more:
            raise _other_form(f"{name}.{more[0]}", "missing", _words(getattr(other, more[0])))
    return pairs


def _words(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _other_form(name: str, running: str, new: str) -> ShapeMismatch:
    return ShapeMismatch(
        f"{name} of the new head is {new}, of the running one {running}: it is stored in another "
        "format. Give a head that is stored as the running one."
    )
