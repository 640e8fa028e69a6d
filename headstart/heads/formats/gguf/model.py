"""A GGUF model, opened: one file or all files of a split, with a config made of its keys.

It is a `Checkpoint`, so that results, provenance and heads treat it as one; its tensors have the
names and types of the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.checkpoint.config import Config
from headstart.checkpoint.config_fields import check_fields
from headstart.checkpoint.gguf.fields import ARRAY, STRING, Field
from headstart.checkpoint.gguf.header import GgufHeader, is_gguf, read_gguf_header
from headstart.checkpoint.header import TensorInfo
from headstart.checkpoint.index import Index
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import BadConfig, BrokenFile, CheckpointError, some
from headstart.families.registry import family
from headstart.heads.formats.gguf.arch import FUSION, Arch
from headstart.heads.formats.gguf.archs import arch_named

SPLIT = re.compile(r"(?P<stem>.+)-(?P<no>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
_MAX_LAYERS, _MAX_SPLITS = 100_000, 10_000
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)")


@dataclass(frozen=True)
class GgufModel(Checkpoint):
    """`folder` is the path of the first file; `headers` are those of all, in order."""

    headers: tuple[GgufHeader, ...]

    @property
    def fields(self) -> dict[str, Field]:
        return self.headers[0].fields

    @property
    def arch_name(self) -> str:
        found = self.fields.get("general.architecture")
        return str(found.value) if found is not None and found.kind == STRING else ""

    @property
    def arch(self) -> Arch | None:
        return arch_named(self.arch_name)

    def value(self, key: str) -> Any:
        """The value of a key below the architecture's name, or None."""
        found = self.fields.get(f"{self.arch_name}.{key}")
        return None if found is None else found.value

    def count(self, key: str) -> int | None:
        """A number of layers; BadConfig where it is none."""
        value = self.value(key)
        if value is not None and (type(value) is not int or not 0 <= value <= _MAX_LAYERS):
            raise BadConfig(
                f"{self.folder}: {self.arch_name}.{key} is {str(value)[:60]}; expected a whole "
                f"number from 0 to {_MAX_LAYERS}. Convert the model again."
            )
        return value

    def blocks(self) -> dict[int, dict[str, TensorInfo]]:
        """Tensors of blocks by number and name below it."""
        result: dict[int, dict[str, TensorInfo]] = {}
        for name, info in self.tensors.items():
            found = _BLOCK.fullmatch(name)
            if found is not None:
                result.setdefault(int(found[1]), {})[found[2]] = info
        return result

    def side_files(self) -> list[Path]:
        return []

    def files_below(self) -> dict[str, Path]:
        return {}

    def foreign_weights(self) -> list[str]:
        return []

    def links(self) -> dict[str, Path]:
        """None that matter: whatever a name leads to was read as GGUF."""
        return {}


def is_gguf_path(path: Path) -> bool:
    """Whether a path is a GGUF file, or a folder that holds GGUF and no safetensors."""
    if not os.path.isdir(path):
        return path.suffix == ".gguf" or is_gguf(path)
    has_others = any(path.glob("*.safetensors")) or (path / "config.json").is_file()
    return not has_others and any(path.glob("*.gguf"))


def open_gguf(path: Path) -> GgufModel:
    """Read and check everything but the tensors themselves."""
    file = _only_model(path) if os.path.isdir(path) else path
    if not file.exists():
        raise CheckpointError(f"{file} does not exist; expected a GGUF file.")
    headers = tuple(read_gguf_header(each) for each in _files(file))
    _check_splits(headers)
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        twice = [name for name in header.tensors if name in tensors]
        if twice:
            raise BrokenFile(
                f"{header.file} holds {some(twice)} again, which an earlier file of the split "
                "holds. Download the files again from one revision."
            )
        tensors |= header.tensors
    names: dict[str, dict[str, str]] = {header.file.name: {} for header in headers}
    index = Index(tensors, names, False, (), {}, {})
    model = GgufModel(headers[0].file, Config({}), index, headers)
    config = config_of(model)
    check_fields(model.folder, config)
    return GgufModel(model.folder, Config(config), index, headers)


def _only_model(folder: Path) -> Path:
    """The first file of the only model in a folder."""
    found = sorted(path for path in folder.glob("*.gguf") if not path.name.startswith("."))
    first = [p for p in found if (m := SPLIT.fullmatch(p.name)) is None or m["no"] == "00001"]
    if len(first) != 1:
        raise CheckpointError(
            f"{folder} holds {some(p.name for p in found)}; expected one model. Give the file."
        )
    return first[0]


def _files(file: Path) -> list[Path]:
    """All files of the split that `file` is part of, or itself."""
    found = SPLIT.fullmatch(file.name)
    if found is None:
        return [file]
    count = int(found["count"])
    if not 1 <= count <= _MAX_SPLITS:
        raise BrokenFile(f"{file} says that there are {count} files. Rename it.")
    files = [
        file.with_name(f"{found['stem']}-{no:05d}-of-{count:05d}.gguf")
        for no in range(1, count + 1)
    ]
    lost = [path.name for path in files if not path.exists()]
    if lost:
        raise BrokenFile(f"{some(lost)} is missing beside {file.name}. Download the whole split.")
    return files


def _check_splits(headers: tuple[GgufHeader, ...]) -> None:
    total = sum(len(header.tensors) for header in headers)
    for no, header in enumerate(headers):
        said = {
            key: header.fields[f"split.{key}"].value
            for key in ("no", "count", "tensors.count")
            if f"split.{key}" in header.fields
        }
        right = {"no": no, "count": len(headers), "tensors.count": total}
        wrong = next((key for key, value in said.items() if value != right[key]), None)
        if wrong is not None:
            raise BrokenFile(
                f"{header.file} says split.{wrong} {str(said[wrong])[:40]}; expected "
                f"{right[wrong]}. Download all files of the split again from one revision."
            )


_KEYS = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "v_head_dim": "attention.value_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "num_shared_experts": "expert_shared_count",
    "moe_latent_size": "moe_latent_size",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
# fields of configs that say whether a tensor is there -> the tensor
_PRESENT = {
    "attention_bias": "attn_q.bias",
    "use_qk_norm": "attn_q_norm.weight",
    "use_head_wise_attn_gate": "attn_gate.weight",
    "add_swa_attention_sink_bias": "attn_sinks.weight",
    "moe_router_enable_expert_bias": "exp_probs_b.bias",
}

# fields that are sizes of a tensor, where the head has it
_SIZED = {"q_lora_rank": "attn_q_a.weight", "moe_latent_size": "ffn_latent_down.weight"}


def config_of(model: GgufModel) -> dict[str, Any]:
    """What the keys say, under the names of published configs, as it holds for the head's layer.

    It is not the published config: what llama.cpp does not need is not in the file.
    """
    arch = model.arch
    total, modules = model.count("block_count") or 0, model.count("nextn_predict_layers")
    blocks = model.blocks()
    layers = trunk_layers(total, modules, fused_blocks(blocks))
    config: dict[str, Any] = {"model_type": model.arch_name, "num_hidden_layers": max(layers, 0)}
    for field_name, key in _KEYS.items():
        found = model.fields.get(f"{model.arch_name}.{key}")
        value = None if found is None else found.value
        if found is not None and found.kind == ARRAY:
            value = value[min(layers, len(value) - 1)] if value else None
        if value is not None:
            config[field_name] = value
    embed = model.tensors.get("token_embd.weight")
    tokens = model.fields.get("tokenizer.ggml.tokens")
    if embed is not None and len(embed.shape) == 2:
        config["vocab_size"] = embed.shape[0]
    elif tokens is not None and tokens.length:
        config["vocab_size"] = tokens.length
    config["tie_word_embeddings"] = "output.weight" not in model.tensors
    own = blocks.get(layers, {})
    config |= {name: tensor in own for name, tensor in _PRESENT.items()}
    for name, tensor in _SIZED.items():
        if tensor in own and len(own[tensor].shape) == 2:
            config[name] = own[tensor].shape[0]
    if arch is not None:
        config |= _of_arch(model, arch, modules, config)
    return config


def fused_blocks(blocks: Mapping[int, Mapping[str, TensorInfo]]) -> list[int]:
    """Numbers of the blocks that belong to a head."""
    return sorted(number for number, own in blocks.items() if FUSION in own)


def trunk_layers(total: int, declared: int | None, fused: list[int]) -> int:
    """Where nothing is declared, the first block that fuses is where the trunk ends."""
    return total - declared if declared else min([*fused, total])


def _of_arch(
    model: GgufModel, arch: Arch, modules: int | None, config: dict[str, Any]
) -> dict[str, Any]:
    owner = family(arch.family)
    found: dict[str, Any] = {
        "model_type": owner.model_types[0],
        "architectures": list(owner.architectures[:1]),
    }
    if modules is not None and owner.count_field is not None:
        found[owner.count_field] = modules
    if arch.kv_b:  # stored as one shared key head of the latent's width
        rope = model.value("rope.dimension_count")
        key, value = (
            model.value("attention.key_length_mla"),
            model.value("attention.value_length_mla"),
        )
        found["num_key_value_heads"] = config.get("num_attention_heads")
        if all(type(each) is int for each in (rope, key, value)):
            found |= {"qk_rope_head_dim": rope, "qk_nope_head_dim": key - rope, "v_head_dim": value}
            found["head_dim"] = key
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim"):
        if name in config:
            found[f"swa_{name}"] = config[name]
    return found
