"""A tiny Llama as a GGUF file, written by the `gguf` library as llama.cpp's converter would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE, POSITIONS = 64, 2, 4, 2, 96, 256
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "\u0120 the", "1 2", "12 3", "a b"]
TOKENS = [
    *SPECIALS,
    *sorted(ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
]
VOCAB = len(TOKENS)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_KV = HIDDEN // HEADS * KV_HEADS
_SHAPES = {
    "attn_q": ("self_attn.q_proj", HIDDEN, HIDDEN),
    "attn_k": ("self_attn.k_proj", _KV, HIDDEN),
    "attn_v": ("self_attn.v_proj", _KV, HIDDEN),
    "attn_output": ("self_attn.o_proj", HIDDEN, HIDDEN),
    "ffn_gate": ("mlp.gate_proj", INTERMEDIATE, HIDDEN),
    "ffn_up": ("mlp.up_proj", INTERMEDIATE, HIDDEN),
    "ffn_down": ("mlp.down_proj", HIDDEN, INTERMEDIATE),
}
Array = np.ndarray[Any, Any]


def permuted(rows: Array, heads: int) -> Array:
    """What llama.cpp's converter does to q and k."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, *, pre: str = "smollm") -> dict[str, Array]:
    """Write the file; returns the values that a Hugging Face checkpoint of it must hold."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (VOCAB - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    expected = _add_tensors(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _add_tensors(writer: GGUFWriter) -> dict[str, Array]:
    draw = np.random.default_rng(0)
    expected: dict[str, Array] = {}

    def add(name: str, theirs: str, values: Array, kind: GGMLQuantizationType, heads: int) -> None:
        # Rows are quantised one by one, so their order does not matter to the values.
        expected[theirs] = dequantize(quantize(values, kind), kind)
        stored = permuted(values, heads) if heads else values
        writer.add_tensor(name, quantize(stored, kind), raw_dtype=kind)

    def weights(*shape: int) -> Array:
        return draw.normal(0, 0.2, shape).astype(np.float32)

    def norm(name: str, theirs: str) -> None:
        values = draw.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
        add(name, theirs, values, GGMLQuantizationType.F32, 0)

    embed = weights(VOCAB, HIDDEN)
    add(
        "token_embd.weight", "model.embed_tokens.weight", embed, GGMLQuantizationType.Q8_0, 0
    )  # fmt: skip
    for i in range(LAYERS):
        norm(f"blk.{i}.attn_norm.weight", f"model.layers.{i}.input_layernorm.weight")
        norm(f"blk.{i}.ffn_norm.weight", f"model.layers.{i}.post_attention_layernorm.weight")
        for ours, (theirs, *shape) in _SHAPES.items():
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(ours, 0)
            name = f"model.layers.{i}.{theirs}.weight"
            kind = GGMLQuantizationType.Q4_1
            add(f"blk.{i}.{ours}.weight", name, weights(*shape), kind, heads)
    norm("output_norm.weight", "model.norm.weight")
    return expected
