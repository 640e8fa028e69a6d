"""Checkpoint tensors into modules and back, strictly: nothing missing, left over, misshapen.

Tensors are streamed one at a time into their places (`models/weight_map.py`). Quantised weights
stay as they are stored where the plan says so (`models/as_stored.py`), else they are dequantised
while they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from headstart.checkpoint.quantized.names import PLAIN
from headstart.checkpoint.quantized.stored import StoredWeight
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import load
from headstart.errors import (
    MissingTensor,
    ShapeMismatch,
    UnexpectedTensor,
    UnsupportedFamily,
    some,
)
from headstart.families.parameters import USUAL
from headstart.models.as_stored import AsStored, Sources, fill_values, plan_as_stored
from headstart.models.beside_rounds import is_beside, send
from headstart.models.config import ModelConfig
from headstart.models.feed_forward import Router
from headstart.models.mtp import MTPHead
from headstart.models.trunk import Trunk
from headstart.models.weight_map import Target, Targets, layer_targets, parameters_of

_WHOLE = ("I64", "I32")  # numbers of tables
_MOST_PACKED = 16  # values in one that is stored, of quantised weights
_READERS = 8  # tensors on their way to a GPU at once
# Stored by some exporters, computed from the config by every engine.
_DERIVED = (".rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Loading:
    """Where weights go, and how they are held there."""

    device: torch.device
    dtype: torch.dtype
    forms: Collection[str] = ()  # quantised ones that stay as they are stored
    why_not: str = "weights were asked for in this type"  # and not others
    experts: Collection[str] | None = None  # of experts, where it is not all of these


@dataclass(frozen=True)
class TrunkNames:
    """Published names of what a trunk has, where families and releases differ."""

    embed: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    lm_head: str = "lm_head.weight"
    layer: str = "model.layers.{layer}."
    prefix: str = "model."  # of what else lies outside of layers


_USUAL_NAMES = TrunkNames()


def fill_trunk(
    trunk: Trunk, tensors: Sources, loading: Loading, max_len: int, names: TrunkNames
) -> list[str]:
    """Give a trunk without memory its memory and its weights; notes about how they are held."""
    targets = trunk_targets(trunk, tensors, names)
    plan = plan_as_stored(trunk, targets, tensors, loading.forms, loading.why_not, loading.experts)
    materialize(trunk, loading.device, loading.dtype)
    if trunk.config.is_tied:
        trunk.lm_head.weight = trunk.embed
    trunk.rotate_up_to(max_len, loading.dtype)
    trunk.to(loading.device)
    ignored = {names.lm_head} if trunk.config.is_tied else set()
    _fill(trunk, tensors, targets, ignored | _hashing(trunk.config, tensors), plan)
    _load_as_stored(trunk, plan, loading)
    return plan.notes(loading.dtype)


def fill_head(head: MTPHead, tensors: Sources, loading: Loading) -> list[str]:
    """The same for a head, whose tensors have our names."""
    targets = head_targets(_parameters(head), head.config, tensors)
    plan = plan_as_stored(head, targets, tensors, loading.forms, loading.why_not, loading.experts)
    materialize(head, loading.device, loading.dtype)
    _fill(head, tensors, targets, _copies(tensors), plan)
    _load_as_stored(head, plan, loading)
    return plan.notes(loading.dtype)


def load_trunk(trunk: Trunk, tensors: Sources, names: TrunkNames = _USUAL_NAMES) -> None:
    """Fill a trunk from published tensors (the head's own must not be among them)."""
    ignored = {names.lm_head} if trunk.config.is_tied else set()
    ignored |= _hashing(trunk.config, tensors)
    _fill(trunk, tensors, trunk_targets(trunk, tensors, names), ignored, AsStored())


def _hashing(config: ModelConfig, tensors: Sources) -> set[str]:
    """Numbers by which n-grams are hashed, which some files hold; they must be the config's."""
    if config.ngrams is None:
        return set()
    expected = config.ngrams.stored
    found = {name: name.rpartition(".ple_embedding.")[2] for name in tensors}
    known = {name for name, last in found.items() if last in expected}
    for name in known:
        source = tensors[name]
        if not isinstance(source, TensorSource) or load(source).tolist() != expected[found[name]]:
            raise ShapeMismatch(
                f"{name} holds other numbers than follow from the config (seed, sizes of n-grams). "
                "Config and weights do not belong together."
            )
    return known


def trunk_targets(trunk: Trunk, tensors: Sources, names: TrunkNames) -> Targets:
    """Published names of a trunk's tensors, and what they fill."""
    whole = {
        "embed": names.embed,
        "final_norm.weight": names.final_norm,
        "final_norm.norm.weight": names.final_norm,  # behind several residual streams
        "lm_head.weight": names.lm_head,
    }
    outside = {**USUAL, **parameters_of(trunk.config)}
    whole |= {
        ours: names.prefix + outside[ours][0] for ours in outside if ours.startswith("final_norm.")
    }
    targets: Targets = []
    for ours in _parameters(trunk):
        if ours in whole and not (ours == "lm_head.weight" and trunk.config.is_tied):
            targets.append((whole[ours], Target(ours)))
        elif ours.startswith("layers."):
            _, layer, role = ours.split(".", 2)
            at = names.layer.format(layer=layer)
            kind = trunk.config.layers[int(layer)]
            targets += layer_targets(ours, at, role, trunk.config, kind, tensors)
    return targets


def load_head(head: MTPHead, tensors: Sources, config: ModelConfig) -> None:
    """Fill a head from tensors under our names; copies of trunk tensors are left out."""
    targets = head_targets(_parameters(head), config, tensors)
    _fill(head, tensors, targets, _copies(tensors), AsStored())


def _copies(tensors: Sources) -> set[str]:
    return {name for name in tensors if name.split(".")[2] in ("embed_tokens", "lm_head")}


def head_targets(
    parameters: Collection[str], config: ModelConfig, stored: Collection[str]
) -> Targets:
    """Our names of a head's tensors, and what they fill of these parameters."""
    targets: Targets = []
    for ours in parameters:
        _, module, role = ours.split(".", 2)
        if role.startswith("block."):
            at = f"modules.{module}.block."
            inside = role.removeprefix("block.")
            targets += layer_targets(ours, at, inside, config, config.head_layer, stored)
        else:
            stored_as = {**USUAL, **parameters_of(config)}.get(role, (role,))[0]
            targets.append((f"modules.{module}.{stored_as}", Target(ours)))
    return targets


def _parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Everything that is loaded: parameters, and buffers that are not computed."""
    return dict(module.state_dict(keep_vars=True))


def _fill(
    module: nn.Module, tensors: Sources, wanted: Targets, ignored: set[str], plan: AsStored
) -> None:
    """Read everything but what the plan has; refuse what is missing or has no place."""
    parameters, targets = _parameters(module), dict(wanted)
    filled = {target.parameter for target in targets.values()}
    unfilled = set(parameters) - filled - {"lm_head.weight"}
    assert not unfilled, f"parameters without a published name: {unfilled}"
    missing = [name for name in targets if name not in tensors]
    if missing:
        raise MissingTensor(
            f"{len(missing)} tensors are missing: {some(missing)}. The config does not describe "
            "these files; download the checkpoint again."
        )
    for name, target in targets.items():
        source = tensors[name]
        is_table = parameters[target.parameter].dtype == torch.int64
        known_types = _WHOLE if is_table else PLAIN
        if isinstance(source, TensorSource) and source.dtype not in known_types:
            raise UnsupportedFamily(
                f"{name} is stored as {source.dtype}; expected {', '.join(known_types)}, or a "
                "quantised format with its scales. Take another release of the checkpoint."
            )
    known = {*targets, *ignored}
    left = [name for name in tensors if name not in known and not name.endswith(_DERIVED)]
    if left:
        raise UnexpectedTensor(
            f"{len(left)} tensors have no place in this model: {some(left)}. Running without them "
            "would give wrong text."
        )

    def copy(name: str) -> None:
        _copy(tensors[name], name, targets[name], parameters[targets[name].parameter])

    for name in targets:
        if targets[name].parameter in plan.parameters:
            path = targets[name].parameter.removesuffix(".weight")
            place = targets[name].of(torch.empty(plan.shapes[path], device="meta"))
            _check_shape(name, tensors[name].shape, place)
    plain = [name for name in targets if targets[name].parameter not in plan.parameters]
    _for_each(copy, plain, next(iter(parameters.values())).device)
    for part in module.modules():
        if isinstance(part, Router):
            part.check_table()


def _load_as_stored(module: nn.Module, plan: AsStored, loading: Loading) -> None:
    def read(path: str) -> None:
        plan.load(module, path, loading.dtype, loading.device)

    _for_each(read, list(plan.parts), loading.device)


def _for_each(act: Callable[[str], None], names: list[str], device: torch.device) -> None:
    if device.type == "cuda" and not is_beside():
        # One thread cannot read and send as fast as files and bus allow.
        stream = torch.cuda.current_stream(device)
        with ThreadPoolExecutor(
            _READERS, initializer=torch.cuda.set_stream, initargs=(stream,)
        ) as pool:
            list(pool.map(act, names))
        return
    for name in names:
        act(name)


def _copy(
    source: TensorSource | StoredWeight, name: str, target: Target, parameter: torch.Tensor
) -> None:
    part = target.of(parameter.data)
    shape = _check_shape(name, source.shape, part)
    if isinstance(source, StoredWeight):
        fill_values(source, part, target.order)
        return
    value = load(source).view(shape)
    if target.order:
        value = value[torch.tensor(target.order)]
    send(value, part)


def _check_shape(name: str, found: tuple[int, ...], part: torch.Tensor) -> tuple[int, ...]:
    shape = found
    while len(shape) > part.dim() and shape[0] == 1:  # a correction stored as one row of a matrix
        shape = shape[1:]
    if tuple(part.shape) != shape:
        raise ShapeMismatch(
            f"{name} has shape {found}; the config asks for {tuple(part.shape)}. Config "
            "and weights do not belong together."
        )
    return shape


def check_size(module: nn.Module, tensors: Sources) -> None:
    """Refuse, before memory is taken, a config that asks for far more than the files hold."""
    wanted = sum(parameter.numel() for parameter in module.parameters())
    held = sum(prod(source.shape) for source in tensors.values())
    if wanted > _MOST_PACKED * held:
        raise ShapeMismatch(
            f"the config asks for {wanted:,} values and the files hold {held:,}. Config and "
            "weights do not belong together."
        )


def materialize(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Give a module built on the meta device real, uninitialised memory of one dtype."""
    return module.to_empty(device=device).to(dtype)
