"""Every tensor of a made checkpoint: names and shapes from the family tables, values by agreement.

Values come from `agreement.py` and a generator seeded per tensor. Tensors are made one at a time,
when they are written, and those of the vocabulary a few rows at a time: memory is bounded by the
keys (`Agreement`) and by the largest matrix of a layer in fp32.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from headstart.calibrate.agreement import Agreement, make_agreement
from headstart.checkpoint.config import Config
from headstart.checkpoint.reader import torch_dtype
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import as_bytes
from headstart.errors import ConfigError
from headstart.families.base import Family, expand
from headstart.families.dims import dims
from headstart.families.experts import fused_slot
from headstart.families.registry import PLAIN_TRUNKS, family, match_family

if TYPE_CHECKING:
    import torch

Shapes = dict[str, tuple[int, ...]]
Parts = Callable[[], "Iterable[torch.Tensor]"]  # a tensor, rows after rows
_ROWS = 2048
# projections that add to the stream, and gates that would take more of it than noise may
_OUTPUTS = (
    "o_proj",
    "down_proj",
    "out_proj",
    "wo_b",
    "wo",
    "w2",
    "dense",
    "input_mix_weight_up",
    "value_proj",
)
_OUT_NORMS = ("attention_out_norm.weight", "mlp_out_norm.weight")
_AFTER_PROJECTION = 0.5  # about the size of what a part gives, for projections of size 1
_FLOAT32 = (
    "A_log",
    "attn_sink",
    "hc_attn_",
    "hc_ffn_",
    "hc_mlp_",
    "hc_head_",
    "e_score_correction_bias",
    "router_bias",
    "gate.bias",
    "compressor.ape",
)
_CORRECTIONS = ("correction_bias", "router_bias")  # of scores that choose experts
_TABLES = (".tid2eid",)  # whole numbers


@dataclass(frozen=True)
class Disturbance:
    """How much layers add to what agreement alone would give; nothing at all is exact."""

    trunk: float  # size of the trunk layers' output projections
    head: float  # of the head's, and of the half of its fusion that sees the hidden state


EXACT = Disturbance(0.0, 0.0)
# Small in the trunk, which keeps to its cycle; large in the head, so that every tensor of it shows
# in which drafts are accepted.
LIVELY = Disturbance(0.05, 2.0)


def calibrated_tensors(
    config: dict[str, Any],
    *,
    rate: float,
    seed: int,
    dtype: str,
    with_head: bool = True,
    fused_experts: bool = False,
    root: str | None = None,
    disturbance: Disturbance = LIVELY,
    agreement: Agreement | None = None,
) -> dict[str, TensorSource]:
    """Every tensor of the checkpoint by published name, made when it is written."""
    parsed = Config(config)
    fields = parsed.fields
    owner = match_family(fields, parsed.model_types, parsed.architectures)
    if owner is None:  # a trunk without published heads: built in the layout it is grafted into
        trunk = PLAIN_TRUNKS[parsed.model_type]
        owner = family(trunk.grafted_as)
        fields = {**fields, "attention_bias": bool(trunk.runtime.fixed.get("attention_bias"))}
        with_head = False
    if agreement is None:
        agreement = make_agreement(
            fields["vocab_size"], fields["hidden_size"], rate=rate, seed=seed
        )
    centred, experts = owner.has_centred_norms(fields), dims(fields).get("experts", 0)
    values = _Values(owner, agreement, seed, disturbance, centred, experts)
    tensors = {
        name: _made(name, shape, dtype, values.trunk(name, shape))
        for name, shape in trunk_shapes(owner, fields).items()
    }
    if with_head:
        naming = owner.naming(fields, root)
        for ours, shape in head_shapes(owner, fields, fused_experts=fused_experts).items():
            name = owner.keys.to_published(ours, naming)
            tensors[name] = _made(name, shape, dtype, values.head(ours, shape))
    return tensors


def trunk_shapes(owner: Family, fields: dict[str, Any]) -> Shapes:
    """All trunk tensors of a config, by published name."""
    trunk, prefix = owner.trunk, owner.trunk.prefixes[0]
    vocab, hidden = fields["vocab_size"], fields["hidden_size"]
    shapes: Shapes = {prefix + trunk.embed: (vocab, hidden)}
    if trunk.final_norm:
        shapes[prefix + trunk.final_norm] = (hidden,)
    if not fields.get("tie_word_embeddings"):
        shapes[trunk.lm_heads[0]] = (vocab, hidden)
    for name, shape in expand(trunk.extras, fields).items():
        shapes[prefix + name] = _known(name, shape)
    for layer in range(fields["num_hidden_layers"]):
        at = prefix + trunk.layer.format(layer=layer)
        table = trunk.layer_kinds(fields)[trunk.kind_of(fields, layer)]
        for name, shape in expand(table, fields).items():
            shapes[at + name] = _known(name, shape)
    return shapes


def head_shapes(owner: Family, fields: dict[str, Any], *, fused_experts: bool = False) -> Shapes:
    """All head tensors of a config, by our names, with the copies that releases store."""
    count = fields.get(owner.count_field) if owner.count_field else None
    modules = count if isinstance(count, int) and count > 0 else owner.default_modules
    expected = owner.expected(fields, modules)
    shapes = {name: _known(name, shape) for name, shape in expected.items()}
    for module in range(modules):
        for role in owner.copies:
            shapes[f"modules.{module}.{role}.weight"] = (
                fields["vocab_size"],
                fields["hidden_size"],
            )
    return _fuse_experts(shapes) if fused_experts else shapes


def _fuse_experts(shapes: Shapes) -> Shapes:
    result: Shapes = {}
    for name, shape in shapes.items():
        slot = fused_slot(name)
        if slot is None:
            result[name] = shape
            continue
        count = result.get(slot.name, (0,))[0]
        wide = shape[0] * (2 if slot.projection != "down" else 1)
        result[slot.name] = (max(count, slot.expert + 1), wide, shape[1])
    return result


def _known(name: str, shape: tuple[int, ...] | None) -> tuple[int, ...]:
    if shape is None:
        raise ConfigError(f"the config does not give the sizes that {name} needs")
    return shape


class _Values:
    """What each tensor holds; the same names and seed give the same values on every machine."""

    def __init__(
        self,
        owner: Family,
        agreement: Agreement,
        seed: int,
        disturbance: Disturbance,
        has_centred_norms: bool,
        num_experts: int,
    ):
        self._owner, self._agreement, self._seed = owner, agreement, seed
        self._has_centred_norms, self._num_experts = has_centred_norms, num_experts
        self._disturbance = disturbance
        trunk = owner.trunk
        self._embed = trunk.prefixes[0] + trunk.embed
        # norms of what a part gives undo the size of its projection: they decide it
        names = owner.runtime.parameters if owner.runtime is not None else {}
        self._out_norms = tuple(n for role in _OUT_NORMS for n in names.get(role, ()))

    def trunk(self, name: str, shape: tuple[int, ...]) -> Parts:
        if name == self._embed:
            return partial(_by_rows, self._agreement.embedding_rows, shape[0])
        if name in self._owner.trunk.lm_heads:
            return partial(_by_rows, self._agreement.lm_head_rows, shape[0])
        return lambda: [self._usual(name, shape, self._disturbance.trunk)]

    def head(self, name: str, shape: tuple[int, ...]) -> Parts:
        role = name.split(".", 2)[-1]
        if role == "embed_tokens.weight":
            return partial(_by_rows, self._agreement.embedding_rows, shape[0])
        if role == "lm_head.weight" and "lm_head" in self._owner.layout.shares:
            return partial(_by_rows, self._agreement.lm_head_rows, shape[0])
        return lambda: [self._head(name, role, shape)]

    def _head(self, name: str, role: str, shape: tuple[int, ...]) -> torch.Tensor:
        import torch

        if role == "lm_head.weight":  # trained apart from the trunk's
            noise = self._usual(name, shape, 1.0) * 0.02
            return self._agreement.lm_head_rows(0, shape[0]) + noise
        if role in ("fuse.weight", "fuse_embed.weight"):
            passed = self._agreement.pass_embedding()
            if role == "fuse_embed.weight":
                return passed
            # The hidden half is noise to the embedding's: what the head is fed shows in its drafts.
            halves = [passed, self._usual(name, (shape[0], shape[0]), self._disturbance.head)]
            if self._owner.layout.fuse_order == "hidden_first":
                halves.reverse()
            return torch.cat(halves, dim=1)
        return self._usual(name, shape, self._disturbance.head)

    def _usual(self, name: str, shape: tuple[int, ...], output_scale: float) -> torch.Tensor:
        import torch

        module = name.removesuffix(".weight").rpartition(".")[2]
        is_output = module in _OUTPUTS or "experts.down_proj" in name or "ple.conv1d" in name
        if output_scale == 0 and (is_output or module in ("fuse", "fuse_hidden")):
            return torch.zeros(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + self._seed)
        if name.endswith(_TABLES):  # which experts a token has
            order = torch.rand(shape[0], self._num_experts, generator=generator).argsort(dim=1)
            return order[:, : shape[1]]
        noise = torch.randn(shape, generator=generator)
        if name.endswith(self._out_norms):  # as large as what projections alone would give
            return (noise * 0.01 + 1) * output_scale * _AFTER_PROJECTION
        if "layernorm" in module or module.endswith(("norm", "norm_f")):
            centred = self._has_centred_norms and "linear_attn" not in name
            return noise * 0.01 + (0.0 if centred else 1.0)
        if module == "A_log":
            return torch.rand(shape, generator=generator).add(1).log()
        if output_scale == 0 and name.endswith(_CORRECTIONS):  # rows choose experts evenly
            return noise * (0.1 / shape[-1])
        if module in ("dt_bias", "D") or len(shape) == 1:
            return noise * 0.01
        scale = output_scale if is_output else 1.0
        return noise * (scale / math.sqrt(shape[-1]))


def _by_rows(make: Callable[[int, int], torch.Tensor], count: int) -> Iterator[torch.Tensor]:
    for start in range(0, count, _ROWS):
        yield make(start, min(start + _ROWS, count))


def _made(name: str, shape: tuple[int, ...], dtype: str, parts: Parts) -> TensorSource:
    stored = "F32" if any(part in name for part in _FLOAT32) else dtype
    if name.endswith(_TABLES):
        stored = "I64"

    def pieces() -> Iterator[memoryview]:
        for part in parts():
            yield as_bytes(part.to(torch_dtype(stored)))

    return TensorSource(stored, shape, pieces, is_copy=False)
