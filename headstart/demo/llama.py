"""The package's GGUF file as an ordinary Hugging Face checkpoint in float32, and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headstart.calibrate.given_tokenizer import GivenTokenizer
from headstart.checkpoint.gguf.values import cast
from headstart.checkpoint.writer import FolderPlan, split_shards
from headstart.demo.package import PACKAGE, checked_path
from headstart.errors import UnsupportedFamily
from headstart.heads.formats.gguf import open_gguf
from headstart.heads.formats.gguf.published import as_published
from headstart.heads.published import PublishedModel

_ROLES = ("bos", "eos", "padding")


def opened(path: Path) -> PublishedModel:
    """The file as a checkpoint; UnsupportedFamily for one that is not like the package's."""
    model = open_gguf(path)
    if model.arch_name != "llama":
        raise UnsupportedFamily(
            f"{path} holds a {model.arch_name[:40]} model; expected llama. Take the file of the "
            "package."
        )
    found = as_published(model)
    if not found.documents:
        raise UnsupportedFamily(f"{path}: {'; '.join(found.said)}. Take the file of the package.")
    return found


def plan_llama(path: Path) -> FolderPlan:
    """The folder that holds what the file holds."""
    model = opened(path)
    ids = _ids(path)
    tensors = {name: cast(model.source(name), "F32") for name in sorted(model.tensors)}
    return FolderPlan(
        shards=split_shards(tensors),
        documents={
            "config.json": {**_config(model.config.raw), **ids},
            # Greedy unless asked otherwise: the same answer in every run of the demo.
            "generation_config.json": {**ids, "do_sample": False},
            **model.documents,
        },
    )


def demo_tokenizer() -> GivenTokenizer:
    """The one of the demo's model, from the installed package."""
    return GivenTokenizer(PACKAGE, opened(checked_path()).documents)


def _config(found: Mapping[str, Any]) -> dict[str, Any]:
    """As releases of Llama write it."""
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps",
        "rope_theta",  # where transformers 4 looks; 5 looks below
        "rope_parameters", "hidden_act", "attention_bias", "mlp_bias", "tie_word_embeddings",
    )  # fmt: skip
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **{name: found[name] for name in names},
        "torch_dtype": "float32",
    }


def _ids(path: Path) -> dict[str, int]:
    """Tokens that the file names for a purpose."""
    fields = open_gguf(path).fields
    found = {role: fields.get(f"tokenizer.ggml.{role}_token_id") for role in _ROLES}
    return {
        f"{'pad' if role == 'padding' else role}_token_id": field.value
        for role, field in found.items()
        if field is not None
    }
