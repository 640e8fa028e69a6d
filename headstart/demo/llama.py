"""A GGUF file of the Llama architecture as an ordinary Hugging Face checkpoint in float32.

llama.cpp turns neighbouring elements of a head by one angle, Hugging Face those half a head
apart: rows of q and k are stored in another order, which is undone here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.writer import FolderPlan, split_shards
from headstart.demo.gguf_file import GgufFile
from headstart.demo.tokenizer import tokenizer_documents
from headstart.errors import UnexpectedTensor, UnsupportedFamily, some

if TYPE_CHECKING:
    from headstart.checkpoint.gguf.values import Floats

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def plan_llama(file: GgufFile) -> FolderPlan:
    """The folder that holds what `file` holds."""
    sizes = _Sizes(file)
    names = {**_OUTSIDE}
    for layer in range(sizes.layers):
        for ours, theirs in _LAYER.items():
            names[f"blk.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
    # A file without `output.weight` has tied embeddings; with one it is another model.
    unexpected = [name for name in file.tensors if name not in names]
    if unexpected:
        raise UnexpectedTensor(
            f"{file.path} holds {some(unexpected)}, for which the demo has no place. Take the file "
            "of the package."
        )
    tensors = {
        theirs: TensorSource(
            "F32", file.tensors[ours].shape, partial(_pieces, file, ours, sizes), is_copy=False
        )
        for ours, theirs in sorted(names.items(), key=lambda pair: pair[1])
    }
    return FolderPlan(
        shards=split_shards(tensors),
        documents={
            "config.json": _config(sizes, file.metadata),
            "generation_config.json": _generation(file.metadata),
            **tokenizer_documents(file.metadata),
        },
    )


class _Sizes:
    """The numbers of a Llama, from metadata."""

    def __init__(self, file: GgufFile) -> None:
        kind = file.metadata.get("general.architecture")
        if kind != "llama":
            raise UnsupportedFamily(
                f"{file.path} holds a {kind} model; expected llama. Take the file of the package."
            )
        own = {n.removeprefix("llama."): v for n, v in file.metadata.items()}
        self.layers = int(own["block_count"])
        self.hidden = int(own["embedding_length"])
        self.intermediate = int(own["feed_forward_length"])
        self.heads = int(own["attention.head_count"])
        self.kv_heads = int(own["attention.head_count_kv"])
        self.positions = int(own["context_length"])
        self.theta = float(own["rope.freq_base"])
        # Stored as a 32-bit float: 1e-05 comes back as 9.99999974e-06.
        self.eps = float(f"{own['attention.layer_norm_rms_epsilon']:.6g}")
        self.vocab = file.tensors["token_embd.weight"].shape[0]


def _config(sizes: _Sizes, metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.hidden // sizes.heads,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": sizes.positions,
        "rms_norm_eps": sizes.eps,
        "rope_theta": sizes.theta,  # where transformers 4 looks; 5 looks below
        "rope_parameters": {"rope_theta": sizes.theta, "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        **_ids(metadata),
    }


def _ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    wanted = {"bos": "bos", "eos": "eos", "padding": "pad"}
    return {
        f"{theirs}_token_id": metadata[f"tokenizer.ggml.{ours}_token_id"]
        for ours, theirs in wanted.items()
        if f"tokenizer.ggml.{ours}_token_id" in metadata
    }


def _generation(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Greedy unless asked otherwise: the same answer in every run of the demo."""
    return {**_ids(metadata), "do_sample": False}


def _pieces(file: GgufFile, name: str, sizes: _Sizes) -> Iterator[memoryview]:
    values = file.values(name)
    if name.endswith("attn_q.weight"):
        values = unpermuted(values, sizes.heads)
    elif name.endswith("attn_k.weight"):
        values = unpermuted(values, sizes.kv_heads)
    yield values.data.cast("B")


def unpermuted(rows: Floats, num_heads: int) -> Floats:
    """Rows of each head from [pairs, 2] back to [2, pairs]."""
    import numpy as np

    count, width = rows.shape
    by_pair = rows.reshape(num_heads, count // num_heads // 2, 2, width)
    return np.ascontiguousarray(by_pair.swapaxes(1, 2)).reshape(count, width)
