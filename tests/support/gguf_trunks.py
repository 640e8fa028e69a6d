"""Trunks in GGUF as llama.cpp's converter writes them, made of tiny checkpoints.

Written down apart from the reader that is tested: what each tensor is made of, by its name. A
fixture of the converter's own (scripts/interop/gguf_engine_check.py) holds every byte to it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants

from headstart.checkpoint.gguf.fields import ARRAY, INT32, KIND_NAMES, STRING, UINT32, Field, field
from headstart.checkpoint.gguf.shard import GgufShard
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.writer import FolderPlan, write_folder
from support.head_edits import config, edited, tensors

FIXTURES = Path(__file__).parents[1] / "fixtures" / "gguf_trunks"
# variant -> changes of its tiny config, as the fixtures were made with
SLIDING = {
    "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "full", *["sliding"] * 3)],
    "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0, 1.0, 1.0],
}
VARIANTS: dict[str, dict[str, Any]] = {
    **{path.stem: {} for path in sorted(FIXTURES.glob("*.json"))},
    "step3p5": SLIDING,
    "mimo_v2": {"swa_head_dim": 64, "sliding_window": 128},
}
PRE = "tokenizer.ggml.pre"
WITHOUT_HEAD = ("llama", "qwen2", "qwen3")
Array = np.ndarray[Any, Any]
_PREFIXES = ("model.language_model.", "model.")
_CENTRED = ("qwen35", "qwen35moe", "qwen3next", "step35")
_PLAIN = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "attn_q_a": "self_attn.q_a_proj", "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b", "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
_PROJECTIONS = ("gate", "up", "down")


def fixture(variant: str) -> dict[str, Any]:
    found = json.loads((FIXTURES / f"{variant}.json").read_text())
    assert isinstance(found, dict)
    return found


class Speller:
    """The values of one trunk under llama.cpp's names."""

    def __init__(self, folder: Path, arch: str):
        raw = config(folder)
        self.arch, self.fields = arch, raw.get("text_config", raw)
        self.own = {n: v.float().numpy() for n, v in tensors(folder).items()}
        self.read: list[str] = []

    def published(self, name: str) -> str:
        """The name under which the checkpoint has it."""
        every = [f"{prefix}{name}" for prefix in _PREFIXES]
        return next((each for each in [*every, name] if each in self.own), name)

    def get(self, name: str) -> Array:
        self.read.append(self.published(name))
        return self.own[self.read[-1]]

    def sources(self, name: str) -> list[str]:
        """What a tensor of the file is made of, as published."""
        self.read.clear()
        self.value(name)
        return list(self.read)

    def value(self, name: str) -> Array:
        root = {"token_embd.weight": "embed_tokens.weight", "output.weight": "lm_head.weight"}
        if name in root:
            return self.get(root[name])
        if name == "output_norm.weight":
            return self.shifted(self.get("norm.weight"))
        _, layer, rest = name.split(".", 2)
        at = f"layers.{layer}."
        special = getattr(self, f"_{rest.partition('.')[0]}", None)
        found = None if special is None else special(at, rest)
        if found is not None:
            return found
        module, _, parameter = rest.rpartition(".")
        if module.endswith("_exps"):
            return self.stacked(at, module.split("_")[1])
        if module.endswith("_shexp") and module != "ffn_gate_inp_shexp":
            return self.shared(at, module.split("_")[1])
        found = self.get(f"{at}{_PLAIN[module]}.{parameter}")
        return (
            self.shifted(found) if rest.endswith("norm.weight") and module != "ssm_norm" else found
        )

    def shifted(self, norm: Array) -> Array:
        return norm + np.float32(1) if self.arch in _CENTRED else norm

    def stacked(self, at: str, kind: str) -> Array:
        if self.arch == "step35":
            return self.get(f"{at}moe.{kind}_proj.weight")
        count = next(
            int(self.fields[n])
            for n in ("n_routed_experts", "num_experts", "moe_num_experts")
            if n in self.fields
        )
        return np.stack([self.get(f"{at}mlp.experts.{i}.{kind}_proj.weight") for i in range(count)])

    def shared(self, at: str, kind: str) -> Array:
        names = ("share_expert", "mlp.shared_expert", "mlp.shared_experts")
        found = [f"{at}{name}.{kind}_proj.weight" for name in names]
        return self.get(next(n for n in found if self.published(n) in self.own))

    def _attn_q(self, at: str, rest: str) -> Array | None:
        return self.paired(at, rest, "q", "num_attention_heads")

    def _attn_k(self, at: str, rest: str) -> Array | None:
        return self.paired(at, rest, "k", "num_key_value_heads")

    def paired(self, at: str, rest: str, kind: str, heads: str) -> Array | None:
        if self.arch != "llama":
            return None
        rows = self.get(f"{at}self_attn.{kind}_proj.{rest.rpartition('.')[2]}")
        parts = rows.reshape(self.fields[heads], 2, -1, *rows.shape[1:])
        return parts.swapaxes(1, 2).reshape(rows.shape)

    def _kv_b(self, at: str) -> Array:
        found = self.get(f"{at}self_attn.kv_b_proj.weight")
        return found.reshape(self.fields["num_attention_heads"], -1, found.shape[1])

    def _attn_k_b(self, at: str, rest: str) -> Array:
        return self._kv_b(at)[:, : self.fields["qk_nope_head_dim"]].swapaxes(1, 2)

    def _attn_v_b(self, at: str, rest: str) -> Array:
        return self._kv_b(at)[:, self.fields["qk_nope_head_dim"] :]

    def _attn_sinks(self, at: str, rest: str) -> Array:
        return self.get(f"{at}self_attn.attention_sink_bias")

    def _exp_probs_b(self, at: str, rest: str) -> Array:
        names = ("mlp.gate", "mlp.moe_statics")
        if self.arch == "step35":
            return self.get(f"{at}moe.router_bias")
        found = [f"{at}{name}.e_score_correction_bias" for name in names]
        return self.get(next(n for n in found if self.published(n) in self.own))

    def _ffn_gate_inp(self, at: str, rest: str) -> Array | None:
        return self.get(f"{at}moe.gate.weight") if self.arch == "step35" else None

    def tiled(self, value: Array, height: int) -> Array:
        """The last rows, one group for each value head: by key head, then by turns of them."""
        keys, heads = (self.fields[f"linear_num_{n}_heads"] for n in ("key", "value"))
        if self.arch == "qwen3next":
            return value
        first = len(value) - heads * height
        parts = value[first:].reshape(keys, heads // keys, height, *value.shape[1:])
        return np.concatenate([value[:first], parts.swapaxes(0, 1).reshape(value[first:].shape)])

    def split(self, at: str) -> tuple[Array, Array]:
        """Qwen3-Next: q, k, v of all heads, and z."""
        value = self.get(f"{at}linear_attn.in_proj_qkvz.weight")
        keys, heads = (self.fields[f"linear_num_{n}_heads"] for n in ("key", "value"))
        wide, tall = self.fields["linear_key_head_dim"], self.fields["linear_value_head_dim"]
        each = value.reshape(keys, -1, value.shape[1])
        group = heads // keys * tall
        cuts = np.split(each, [wide, 2 * wide, 2 * wide + group], axis=1)
        q, k, v, z = (part.reshape(-1, value.shape[1]) for part in cuts)
        return np.concatenate([q, k, v]), z

    def _attn_qkv(self, at: str, rest: str) -> Array:
        if self.arch == "qwen3next":
            return self.split(at)[0]
        width = self.fields["linear_value_head_dim"]
        return self.tiled(self.get(f"{at}linear_attn.in_proj_qkv.weight"), width)

    def _attn_gate(self, at: str, rest: str) -> Array:
        if self.arch == "qwen3next":
            return self.split(at)[1]
        if self.arch == "step35":
            return self.get(f"{at}self_attn.g_proj.weight")
        width = self.fields["linear_value_head_dim"]
        return self.tiled(self.get(f"{at}linear_attn.in_proj_z.weight"), width)

    def _ssm_a(self, at: str, rest: str) -> Array:
        found = torch.from_numpy(self.tiled(self.get(f"{at}linear_attn.A_log"), 1))
        return (-torch.exp(found)).numpy()

    def _ssm_dt(self, at: str, rest: str) -> Array:
        return self.tiled(self.get(f"{at}linear_attn.dt_bias"), 1)

    def _ssm_alpha(self, at: str, rest: str) -> Array:
        return self.tiled(self.get(f"{at}linear_attn.in_proj_a.weight"), 1)

    def _ssm_beta(self, at: str, rest: str) -> Array:
        return self.tiled(self.get(f"{at}linear_attn.in_proj_b.weight"), 1)

    def _ssm_ba(self, at: str, rest: str) -> Array:
        return self.get(f"{at}linear_attn.in_proj_ba.weight")

    def _ssm_conv1d(self, at: str, rest: str) -> Array:
        found = self.get(f"{at}linear_attn.conv1d.weight").squeeze(1)
        return self.tiled(found, self.fields["linear_value_head_dim"])

    def _ssm_out(self, at: str, rest: str) -> Array:
        found = self.get(f"{at}linear_attn.out_proj.weight")
        return self.tiled(found.T.copy(), self.fields["linear_value_head_dim"]).T.copy()


def encoded(value: Array, kind: str) -> bytes:
    value = np.ascontiguousarray(value, np.float32)
    if kind == "F32":
        return value.tobytes()
    if kind == "BF16":
        return torch.from_numpy(value).bfloat16().view(torch.int16).numpy().tobytes()
    return bytes(quants.quantize(value, GGMLQuantizationType[kind]).tobytes())


def rounded(value: Array, kind: str) -> Array:
    """What a type leaves of a matrix's values."""
    raw = quants.quantize(np.ascontiguousarray(value, np.float32), GGMLQuantizationType[kind])
    return quants.dequantize(raw, GGMLQuantizationType[kind])


def kind_of(name: str, listed: str, kind: str | None) -> str:
    """The type of a tensor where matrices have the type `kind`."""
    own, shape = listed.split()[:2]
    columns = int(shape.split("x")[-1])
    return own if kind is None or own != "BF16" or columns % 32 else kind


def keys_of(made: dict[str, Any], num_layers: int) -> list[Field]:
    """The keys of a trunk alone."""
    number = {name: kind for kind, name in enumerate(KIND_NAMES)}
    result = [field("general.architecture", made["arch"], STRING)]
    for name, (kind, value) in made["keys"].items():
        if name.endswith("nextn_predict_layers"):
            continue
        if name == f"{made['arch']}.block_count":
            value = num_layers
        if isinstance(value, list):
            is_each = name.rpartition(".")[2] != "dimension_sections"
            value = value[:num_layers] if is_each else value
            result.append(field(name, value, ARRAY, number[kind]))
        else:
            result.append(field(name, value, number[kind]))
    return result


def write_trunk(
    folder: Path, variant: str, out: Path, *, kind: str | None = None,
    fields: tuple[Field, ...] = (), change: Any = None,
) -> Path:  # fmt: skip
    """The trunk of a tiny checkpoint; `kind`: the type of its matrices, else as converted."""
    made = fixture(variant)
    speller = Speller(folder, made["arch"])
    held: dict[str, TensorSource] = {}
    for name, listed in made["tensors"].items():
        value = speller.value(name)
        if change is not None:
            value = change(name, value)
        type_ = kind_of(name, listed, kind)
        data = encoded(value, type_)
        held[name] = TensorSource(type_, value.shape, lambda data=data: (data,), is_copy=False)
    vocab = speller.fields["vocab_size"]
    tokens = field("tokenizer.ggml.tokens", [f"t{i}" for i in range(vocab)], ARRAY, STRING)
    kinds = field("tokenizer.ggml.token_type", [1] * vocab, ARRAY, INT32)
    own = field("tokenizer.ggml.model", "gpt2", STRING), tokens, kinds
    ends = field("tokenizer.ggml.eos_token_id", 1, UINT32)
    if variant == "glm4_moe_lite" and not any(each.name == PRE for each in fields):
        fields = (*fields, field(PRE, "glm4", STRING))  # what tells it from DeepSeek
    keys = (*keys_of(made, speller.fields["num_hidden_layers"]), *own, ends, *fields)
    write_folder(FolderPlan({"trunk.gguf": GgufShard(held, keys)}), out, provenance={})
    return out / "trunk.gguf"


def dequantised(folder: Path, variant: str, kind: str, out: Path) -> Path:
    """The checkpoint whose matrices have the values that a file in `kind` keeps of them."""
    made = fixture(variant)
    speller = Speller(folder, made["arch"])
    changed: dict[str, Array] = {}
    for name, listed in made["tensors"].items():
        if kind_of(name, listed, kind) != kind:
            continue
        for published in speller.sources(name):
            value = speller.own[published]
            if name.endswith(("attn_k_b.weight", "attn_v_b.weight")):
                heads, nope = (
                    speller.fields["num_attention_heads"],
                    speller.fields["qk_nope_head_dim"],
                )
                parts = value.reshape(heads, -1, value.shape[1])
                key = rounded(parts[:, :nope].swapaxes(1, 2), kind).swapaxes(1, 2)
                both = np.concatenate([key, rounded(parts[:, nope:], kind)], axis=1)
                changed[published] = both.reshape(value.shape)
            else:
                changed[published] = rounded(value, kind)

    def give(own: dict[str, torch.Tensor]) -> None:
        own.update({n: torch.from_numpy(v).contiguous() for n, v in changed.items()})

    return edited(folder, out, change=give)
