"""Heads of every family that llama.cpp knows, and trunks in GGUF for them to go into."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from headstart.checkpoint.gguf.fields import ARRAY, BOOL, INT32, STRING, UINT32, Field, field
from headstart.checkpoint.gguf.shard import GgufShard
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.writer import FolderPlan, split_shards, write_folder
from headstart.families.names import Naming
from headstart.families.registry import family
from headstart.heads.formats.gguf.arch import Arch

HIDDEN, VOCAB, LAYERS = 64, 16, 2
# One config for all: a family reads what it knows.
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": LAYERS,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96,
    "n_routed_experts": 3, "num_experts": 3, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "num_shared_experts": 1, "shared_expert_intermediate_size": 32, "q_lora_rank": 32,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "index_n_heads": 2, "index_head_dim": 32,
    "use_qk_norm": True, "attention_bias": True, "num_attention_groups": 2,
    "use_head_wise_attn_gate": True, "add_swa_attention_sink_bias": True,
    "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_head_dim": 32,
    "swa_v_head_dim": 32, "moe_router_enable_expert_bias": True,
    "attention_other_setting": {
        "num_attention_heads": 2, "num_attention_groups": 2, "head_dim": 32,
    },
    "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 3,
}  # fmt: skip
# Blocks of families that have no table of their own.
_BLOCKS = {
    "hy_v3": {
        "input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,),
        **{f"self_attn.{each}_proj.weight": (HIDDEN, 64) for each in "qkvo"},
        "self_attn.q_norm.weight": (32,), "self_attn.k_norm.weight": (32,),
        "mlp.router.gate.weight": (2, HIDDEN), "mlp.expert_bias": (2,),
        **{f"mlp.experts.{i}.{each}_proj.weight": (HIDDEN, HIDDEN)
           for i in range(2) for each in ("gate", "up", "down")},
        **{f"mlp.shared_mlp.{each}_proj.weight": (HIDDEN, HIDDEN)
           for each in ("gate", "up", "down")},
    },
    "bailing_moe_v3": {
        "input_layernorm.weight": (HIDDEN,), "attention.kv_b_proj.weight": (128, 32),
        "attention.q_a_proj.weight": (32, HIDDEN), "attention.g_proj.weight": (2, HIDDEN),
        "attention.dense.weight": (HIDDEN, 64), "mlp.gate.expert_bias": (3,),
        "mlp.gate.weight": (3, HIDDEN),
    },
}  # fmt: skip

Fill = Callable[[str, tuple[int, ...]], np.ndarray[Any, Any]]  # bits of BF16 values


def random_bits(seed: int = 0) -> Fill:
    """Values of every size, as weights and norms have them: also tiny ones, and minus zero."""
    draw = np.random.default_rng(seed)

    def fill(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        values = (draw.normal(0, 0.2, shape) * 2.0 ** -draw.integers(0, 30, shape)).astype("<f4")
        values.reshape(-1)[:2] = [0.0, -0.0]
        return (values.view("<u4") >> 16).astype("<u2")

    return fill


def config_of(arch: Arch) -> dict[str, Any]:
    owner = family(arch.family)
    config = {**SIZES, "model_type": owner.model_types[0], "architectures": owner.architectures[:1]}
    if arch.kv_b:
        config |= {"kv_lora_rank": 32, "v_head_dim": 32}
    return config


def write_head(arch: Arch, out: Path, fill: Fill, *, num_modules: int = 1) -> Path:
    """A checkpoint of the family that holds its head and the trunk's embedding."""
    owner = family(arch.family)
    config = config_of(arch)
    if owner.count_field:
        config[owner.count_field] = num_modules
    naming = Naming(owner.keys.roots[0], LAYERS, owner.num_sub_layers(config))
    shapes = dict(owner.expected(config, num_modules))
    for module in range(num_modules):
        for name, shape in _BLOCKS.get(arch.family, {}).items():
            shapes[f"modules.{module}.block.{name}"] = shape
    prefix = owner.trunk.prefixes[0]
    tensors = {prefix + owner.trunk.embed: _source("embed", (VOCAB, HIDDEN), fill)}
    for name, shape in shapes.items():
        assert shape is not None, name
        tensors[owner.keys.to_published(name, naming)] = _source(name, shape, fill)
    plan = FolderPlan(split_shards(tensors), {}, {"config.json": config})
    write_folder(plan, out, provenance={})
    return out


def _source(name: str, shape: tuple[int, ...], fill: Fill) -> TensorSource:
    data = fill(name, shape).tobytes()
    return TensorSource("BF16", shape, lambda: (data,), is_copy=False)


def _held(kind: str, shape: tuple[int, ...], data: bytes) -> TensorSource:
    return TensorSource(kind, shape, lambda: (data,), is_copy=False)


def trunk_shards(
    arch: Arch, *, splits: int = 1, declared: int | None = None, fields: tuple[Field, ...] = ()
) -> dict[str, GgufShard]:
    """A trunk without head, its tensors dealt out to `splits` files."""
    at = f"{arch.name}."
    keys = [
        field("general.architecture", arch.name, STRING),
        field("general.name", "", STRING),
        field(f"{at}block_count", LAYERS + (declared or 0), UINT32),
        field(f"{at}embedding_length", HIDDEN, UINT32),
        field(f"{at}attention.key_length", 32, UINT32),
        field(f"{at}rope.dimension_sections", [11, 11, 10, 0], ARRAY, INT32),
        field(f"{at}attention.value_length", 32, UINT32),
        *fields,
        field("tokenizer.ggml.tokens", [f"t{i}" for i in range(VOCAB)], ARRAY, STRING),
        field("tokenizer.ggml.merges", [], ARRAY, STRING),
    ]
    if declared is not None:
        keys.append(field(f"{at}nextn_predict_layers", declared, UINT32))
    example = arch.layer_values(config_of(arch), 0)
    if "attention.head_count_kv" not in example:
        keys.append(field(f"{at}attention.head_count_kv", 2, UINT32))
    kinds = {bool: BOOL, int: INT32}
    for key, value in example.items():
        if type(value) in kinds:
            keys.append(field(f"{at}{key}", [value] * LAYERS, ARRAY, kinds[type(value)]))
    draw = np.random.default_rng(7)
    tensors = {
        "token_embd.weight": _held("Q8_0", (VOCAB, HIDDEN), draw.bytes(VOCAB * 68)),
        "output_norm.weight": _held("F32", (HIDDEN,), draw.bytes(4 * HIDDEN)),
        "output.weight": _held("Q4_K", (VOCAB, 256), draw.bytes(VOCAB * 144)),
    }
    for layer in range(LAYERS):
        tensors[f"blk.{layer}.attn_norm.weight"] = _held("F32", (HIDDEN,), draw.bytes(4 * HIDDEN))
        tensors[f"blk.{layer}.odd.weight"] = _held("I8", (3,), draw.bytes(3))
    if splits == 1:
        return {"trunk.gguf": GgufShard(tensors, tuple(keys))}
    names = list(tensors)
    shards = {}
    for number in range(splits):
        own = {name: tensors[name] for name in names[number::splits]}
        split = (
            field("split.no", number, 2),
            field("split.count", splits, 2),
            field("split.tensors.count", len(tensors), INT32),
        )
        first = tuple(keys) if number == 0 else ()
        shards[f"trunk-{number + 1:05d}-of-{splits:05d}.gguf"] = GgufShard(own, (*first, *split))
    return shards


def write_trunk(arch: Arch, folder: Path, **options: Any) -> Path:
    """The first file of a trunk."""
    shards = trunk_shards(arch, **options)
    write_folder(FolderPlan(shards), folder, provenance={})
    return folder / next(iter(shards))
