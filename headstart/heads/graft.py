"""Adds a fresh head to a checkpoint that has none, to be trained afterwards.

The block starts as a copy of the trunk's last layer of the right kind, norms as identities, the
out norm as the trunk's final norm (softer where embeddings are tied), the fusion as the mean of
its two inputs; a dense MLP on a trunk that has experts alone adds nothing. Trunks for which no head
layout is published (`families/plain.py`) become a layout that engines serve.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from headstart.checkpoint.quantized.described import quantization_of
from headstart.checkpoint.quantized.names import all_names
from headstart.checkpoint.quantized.reading import quantized_weights
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import as_bytes
from headstart.errors import CheckpointError, UnsupportedFamily, some
from headstart.families.base import Family, expand
from headstart.families.dims import Fields
from headstart.families.experts import fused_slot
from headstart.families.registry import GRAFTED_AS, family
from headstart.heads.detection import find_head_of, require_family
from headstart.heads.experts import has_fused_experts, split_experts
from headstart.heads.head import Head, dequantize
from headstart.heads.operation import Operation
from headstart.heads.plain_trunk import described_as, missing_biases
from headstart.heads.sharing import trunk_prefix, trunk_tensor
from headstart.heads.stitch import plan_stitch

if TYPE_CHECKING:
    import torch

_INIT_STD = 0.02
# With tied embeddings whatever passes an input on says that token again, loudly: training would
# have to unlearn it first (docs/lab-log.md). The scale changes no arg-max.
_TIED_SCALE = 0.2
_MLP_OUTPUT = "block.mlp.down_proj.weight"  # of a dense block on a trunk that has experts alone


def plan_graft(model: Checkpoint, given: Head | None = None) -> Operation:
    """`model`, which has no head, with a fresh one, or with one that was trained for it."""
    extra: dict[str, TensorSource] = {}
    documents: dict[str, str] = {}
    changes = []
    if given is None:
        changes.append(
            "the head is untrained: what it is worth on real text is unknown until it is trained"
        )
    if model.config.model_type in GRAFTED_AS:
        kind = model.config.model_type
        layout = family(GRAFTED_AS[kind])
        model = replace(model, config=described_as(model, layout))
        dtype = _dtype(model, layout)
        extra = {
            name: _made(shape, dtype, lambda s: _full(s, 0.0))
            for name, shape in missing_biases(model, layout)
        }
        documents = dict(layout.remote_code)
        changes.append(f"the {kind} trunk is described as {layout.name} (same values, same text)")
        if extra:
            changes.append(
                f"{len(extra)} zero biases were added, which {layout.name} attention has"
            )
    owner = require_family(model)
    found = find_head_of(model, owner)
    if found.tensors:
        raise CheckpointError(
            f"{model.folder} has a head ({found.state}). To replace it use `headstart stitch`; to "
            "complete it, `headstart restore`."
        )
    if found.state == "declared-but-missing":
        changes.append(
            "the config declares a head that is not there: `headstart restore` gives back the "
            "one that was lost, if you have the original"
        )
    head = given or fresh_head(model, owner)
    operation = plan_stitch(
        replace(head, changes=(*changes, *head.changes)),
        model, name="graft", extra=extra, documents=documents,
    )  # fmt: skip
    if given is None:
        operation = replace(operation, details={**operation.details, "fresh": True})
    return operation


def fresh_head(model: Checkpoint, owner: Family) -> Head:
    """A head of the family's layout, made from the trunk."""
    fields = model.config.fields
    count = owner.default_modules
    expected = owner.expected(fields, count)
    unknown = [name for name, shape in expected.items() if shape is None]
    if not owner.block(owner.fields_of_head(fields)) or unknown:
        raise UnsupportedFamily(
            f"a fresh {owner.name} head cannot be made: {some(unknown) or 'its block'} has no "
            "known shape. Supported are the families that `headstart families` marks complete."
        )
    dtype = _dtype(model, owner)
    layers = _source_layers(model, owner)
    tensors: dict[str, TensorSource] = {}
    for name, shape in expected.items():
        assert shape is not None
        role = name.split(".", 2)[2]
        is_block = role.startswith("block.")
        found = layers(role.removeprefix("block."), shape) if is_block else None
        tensors[name] = found or _role(model, owner, role, shape, dtype)
    head = Head(owner, tensors, model.config.raw, model, owner.keys.roots[0], count)
    return replace(dequantize(head), changes=())


def _source_layers(
    model: Checkpoint, owner: Family
) -> Callable[[str, tuple[int, ...]], TensorSource | None]:
    """A lookup of block tensors in the trunk, dequantised where they are quantised."""
    prefix = trunk_prefix(model, owner)
    stored = {n: model.source(n) for n in model.tensors if ".experts." in n}
    split = split_experts(stored) if has_fused_experts(stored) else {}
    order = _layer_order(owner, model.config.fields)
    quantization = quantization_of(model)

    def find(name: str, shape: tuple[int, ...]) -> TensorSource | None:
        sub_layer, suffix = _sub_layer(name)
        for layer in order[sub_layer]:
            full = prefix + owner.trunk.layer.format(layer=layer) + suffix
            own = {n: model.source(n) for n in all_names(full) if n in model.tensors}
            quantized = quantized_weights(own, quantization).get(full)
            if quantized is not None and quantized.shape == shape:
                return quantized.source()
            if full in model.tensors and model.info(full).shape == shape:
                return model.source(full)
            if fused_slot(full) is not None and full in split and split[full].shape == shape:
                return split[full]
        return None

    return find


def _sub_layer(name: str) -> tuple[str, str]:
    """Nemotron's sub-layers are numbered; each resembles a whole trunk layer."""
    number, _, rest = name.partition(".")
    return (number, rest) if number.isdigit() else ("", name)


def _layer_order(owner: Family, fields: Fields) -> dict[str, list[int]]:
    """For each sub-layer of the block: trunk layers, those of its kind first, the last first."""
    names: dict[str, set[str]] = {}
    for name in expand(owner.block(owner.fields_of_head(fields)), owner.fields_of_head(fields)):
        sub_layer, suffix = _sub_layer(name)
        names.setdefault(sub_layer, set()).add(suffix)
    tables = owner.trunk.layer_kinds(fields)
    kinds = {kind: set(expand(table, fields)) for kind, table in tables.items()}
    layers = range(int(fields.get("num_hidden_layers") or 0))
    result = {}
    for sub_layer, wanted in names.items():
        alike = {kind for kind, found in kinds.items() if wanted <= found}
        is_alike = [bool(kinds) and owner.trunk.kind_of(fields, i) in alike for i in layers]
        result[sub_layer] = sorted(layers, key=lambda i: (is_alike[i], i), reverse=True)
    return result


def _role(
    model: Checkpoint, owner: Family, role: str, shape: tuple[int, ...], dtype: str
) -> TensorSource:
    """A tensor that no trunk layer has."""
    trunk_names = {"out_norm.weight": "final_norm", "lm_head.weight": "lm_head"}
    if role in trunk_names:
        info = trunk_tensor(model, owner, trunk_names[role])
        if info is not None:
            is_soft = role == "out_norm.weight" and _is_tied(model, owner)
            return _scaled(model.source(info.name)) if is_soft else model.source(info.name)
    if role.startswith("hc_head."):
        at = trunk_prefix(model, owner) + owner.trunk.hc_head
        return model.source(at + role.removeprefix("hc_head."))
    if role == "fuse.weight":
        half = (shape[0], shape[0])
        return _side_by_side([_made(half, dtype, _scaled_identity)] * 2, shape, dtype)
    if role in ("fuse_embed.weight", "fuse_hidden.weight"):
        return _made(shape, dtype, _scaled_identity)
    if "norm" in role and len(shape) > 1:  # a gate of a norm: sigmoids of 0 leave it alone
        return _made(shape, dtype, lambda s: _full(s, 0.0))
    if "norm" in role:
        value = 0.0 if owner.has_centred_norms(model.config.fields) else 1.0
        return _made(shape, dtype, lambda s: _full(s, value))
    # An MLP that resembles none of the trunk's adds nothing at first, rather than noise.
    if len(shape) == 1 or role == _MLP_OUTPUT:
        return _made(shape, dtype, lambda s: _full(s, 0.0))
    seed = zlib.crc32(role.encode())
    return _made(shape, dtype, lambda s: _random(s, seed))


def _is_tied(model: Checkpoint, owner: Family) -> bool:
    is_tied = bool(model.config.fields.get("tie_word_embeddings"))
    return is_tied and not owner.has_centred_norms(model.config.fields)


def _scaled(source: TensorSource) -> TensorSource:
    from headstart.checkpoint.values import load

    def pieces() -> Iterator[memoryview]:
        yield as_bytes(load(source) * _TIED_SCALE)

    return TensorSource(source.dtype, source.shape, pieces, is_copy=False)


def _side_by_side(halves: list[TensorSource], shape: tuple[int, ...], dtype: str) -> TensorSource:
    from headstart.checkpoint.values import load

    def pieces() -> Iterator[memoryview]:
        import torch

        yield as_bytes(torch.cat([load(half) for half in halves], dim=1))

    return TensorSource(dtype, shape, pieces, is_copy=False)


def _made(
    shape: tuple[int, ...], dtype: str, make: Callable[[tuple[int, ...]], torch.Tensor]
) -> TensorSource:
    def pieces() -> Iterator[memoryview]:
        from headstart.checkpoint.reader import torch_dtype

        yield as_bytes(make(shape).to(torch_dtype(dtype)))

    return TensorSource(dtype, shape, pieces, is_copy=False)


def _scaled_identity(shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.eye(shape[0]) * 0.5


def _full(shape: tuple[int, ...], value: float) -> torch.Tensor:
    import torch

    return torch.full(shape, value)


def _random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * _INIT_STD


def _dtype(model: Checkpoint, owner: Family) -> str:
    info = trunk_tensor(model, owner, "final_norm") or trunk_tensor(model, owner, "embed_tokens")
    return info.dtype if info is not None and info.dtype in ("F32", "F16", "BF16") else "BF16"
