"""How llama.cpp spells the heads of each family: architecture, names, value changes, builds.

A head is blocks behind those of the trunk: `blk.{L+i}.nextn.*` for the tensors around the block,
the names of any layer for the rest. Facts are those of llama.cpp's converter (conversion/) and
loader (src/models/) at build b10586.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headstart.families.dims import Fields
from headstart.families.engines import served_by

# keys with one value for each layer, which must cover the head's blocks too
PER_LAYER = (
    "attention.head_count", "attention.head_count_kv", "feed_forward_length",
    "attention.sliding_window_pattern", "attention.recurrent_layers", "swiglu_clamp_exp",
    "swiglu_clamp_shexp",
)  # fmt: skip
LayerValues = Callable[[Fields, int], Mapping[str, Any]]


def names(*tables: str) -> dict[str, str]:
    """Lines of `our name` `GGUF name`, below `modules.{i}.` and `blk.{L+i}.`."""
    pairs = [line.split() for table in tables for line in table.split("\n") if line.strip()]
    return {ours: theirs for ours, theirs in pairs}


_ROLES = """
    fuse           nextn.eh_proj
    embed_norm     nextn.enorm
    hidden_norm    nextn.hnorm
    out_norm       nextn.shared_head_norm
    embed_tokens   nextn.embed_tokens
    lm_head        nextn.shared_head_head
"""
_LAYER_OUT_NORM = "out_norm layer_output_norm"
_INPUT_NORM = "block.input_layernorm attn_norm"
_FFN_NORM = "block.post_attention_layernorm ffn_norm"
_POST_NORM = "block.post_attention_layernorm post_attention_norm"
_GQA = """
    block.self_attn.q_proj   attn_q
    block.self_attn.k_proj   attn_k
    block.self_attn.v_proj   attn_v
    block.self_attn.o_proj   attn_output
    block.self_attn.q_norm   attn_q_norm
    block.self_attn.k_norm   attn_k_norm
"""
_LATENT = """
    {at}.q_a_proj             attn_q_a
    {at}.q_a_layernorm        attn_q_a_norm
    {at}.q_b_proj             attn_q_b
    {at}.q_proj               attn_q
    {at}.kv_a_proj_with_mqa   attn_kv_a_mqa
    {at}.kv_a_layernorm       attn_kv_a_norm
"""
_MLA = _LATENT.format(at="block.self_attn") + "block.self_attn.o_proj attn_output"
_INDEXER = """
    block.self_attn.indexer.wq_b           indexer.attn_q_b
    block.self_attn.indexer.wk             indexer.attn_k
    block.self_attn.indexer.weights_proj   indexer.proj
    block.self_attn.indexer.k_norm         indexer.k_norm
"""
_DENSE = """
    block.mlp.gate_proj   ffn_gate
    block.mlp.up_proj     ffn_up
    block.mlp.down_proj   ffn_down
"""
_STACKS = """
    block.mlp.experts.gate_proj   ffn_gate_exps
    block.mlp.experts.up_proj     ffn_up_exps
    block.mlp.experts.down_proj   ffn_down_exps
"""
_EXPERTS = _STACKS + "block.mlp.gate ffn_gate_inp"
_SHARED = """
    block.mlp.shared_experts.gate_proj   ffn_gate_shexp
    block.mlp.shared_experts.up_proj     ffn_up_shexp
    block.mlp.shared_experts.down_proj   ffn_down_shexp
"""
_CORRECTION = "block.mlp.gate.e_score_correction_bias exp_probs_b.bias"
_SIGMOID_MOE = f"{_EXPERTS}{_SHARED}{_CORRECTION}"
_QWEN_MOE = (
    _EXPERTS
    + """
    block.mlp.shared_expert.gate_proj   ffn_gate_shexp
    block.mlp.shared_expert.up_proj     ffn_up_shexp
    block.mlp.shared_expert.down_proj   ffn_down_shexp
    block.mlp.shared_expert_gate        ffn_gate_inp_shexp
"""
)


@dataclass(frozen=True, kw_only=True)
class Arch:
    """One architecture of llama.cpp, as it spells the heads of one family."""

    name: str
    family: str
    names: Mapping[str, str]
    shifts_norms: bool = False  # every norm is stored as 1 + w
    kv_b: str = ""  # the projection that is stored as two: attn_k_b (transposed) and attn_v_b
    # GGUF names whose rows, in each attention head, are stored as pairs instead of halves
    paired: tuple[str, ...] = ()
    shares_roles: bool = False  # the tensors around the block exist once and are stored in each
    tolerates_missing: bool = True  # loads where a count is declared and no head is there
    max_modules: int | None = None  # more are refused by llama.cpp
    # what arrays with one value per layer hold for a module
    layer_values: LayerValues = lambda fields, module: {}

    @property
    def drafts_since(self) -> str | None:
        """The build that first drafted with it; None: none does."""
        found = served_by(self.family).get("llamacpp")
        return None if found is None else found.since

    @property
    def caution(self) -> str:
        """What to know about how llama.cpp runs it."""
        found = served_by(self.family).get("llamacpp")
        return "" if found is None else found.caution


def _step_values(fields: Fields, module: int) -> dict[str, Any]:
    kinds = fields.get("layer_types") or []
    layer = int(fields.get("num_hidden_layers") or 0) + module
    slides = kinds[layer : layer + 1] == ["sliding_attention"]
    own = fields.get("attention_other_setting") or {} if slides else {}
    groups = fields.get("num_attention_groups") or fields.get("num_key_value_heads")
    return {
        "attention.head_count": own.get("num_attention_heads", fields.get("num_attention_heads")),
        "attention.head_count_kv": own.get("num_attention_groups", groups),
        "attention.sliding_window_pattern": slides,
        "swiglu_clamp_exp": 0.0,
        "swiglu_clamp_shexp": 0.0,
    }


def _mimo_values(fields: Fields, module: int) -> dict[str, Any]:
    return {
        "attention.head_count_kv": fields.get("swa_num_key_value_heads"),
        "attention.sliding_window_pattern": 1,
    }


def _nemotron_values(fields: Fields, module: int) -> dict[str, Any]:
    return {
        "attention.head_count_kv": fields.get("num_key_value_heads"),
        "feed_forward_length": fields.get("moe_intermediate_size"),
    }


_QWEN_VALUES: LayerValues = lambda fields, module: {"attention.recurrent_layers": False}  # noqa: E731
_BAILING_VALUES: LayerValues = lambda fields, module: {  # noqa: E731
    "attention.head_count_kv": 1, "swiglu_clamp_exp": 0.0, "swiglu_clamp_shexp": 0.0,
}  # fmt: skip

ARCHS: tuple[Arch, ...] = (
    Arch(
        name="qwen3next",
        family="qwen3_next",
        names=names(_ROLES, _INPUT_NORM, _POST_NORM, _GQA, _QWEN_MOE),
        shifts_norms=True,
        tolerates_missing=False,
        max_modules=1,
        layer_values=_QWEN_VALUES,
    ),
    Arch(
        name="qwen35",
        family="qwen3_5",
        names=names(_ROLES, _INPUT_NORM, _POST_NORM, _GQA, _DENSE),
        shifts_norms=True,
        tolerates_missing=False,
        max_modules=1,
        layer_values=_QWEN_VALUES,
    ),
    Arch(
        name="qwen35moe",
        family="qwen3_5_moe",
        names=names(_ROLES, _INPUT_NORM, _POST_NORM, _GQA, _QWEN_MOE),
        shifts_norms=True,
        tolerates_missing=False,
        max_modules=1,
        layer_values=_QWEN_VALUES,
    ),
    Arch(
        name="glm4moe",
        family="glm4_moe",
        names=names(_ROLES, _INPUT_NORM, _POST_NORM, _GQA, _SIGMOID_MOE),
        tolerates_missing=False,
    ),
    Arch(
        name="glm4",
        family="glm_ocr",
        names=names(
            _ROLES,
            _INPUT_NORM,
            _FFN_NORM,
            _GQA,
            """
            block.post_self_attn_layernorm   post_attention_norm
            block.post_mlp_layernorm         post_ffw_norm
            block.mlp.gate_up_proj           ffn_up
            block.mlp.down_proj              ffn_down
            """,
        ),
        tolerates_missing=False,
    ),
    Arch(
        name="deepseek2",
        family="glm4_moe_lite",
        names=names(_ROLES, _INPUT_NORM, _FFN_NORM, _MLA, _SIGMOID_MOE),
        kv_b="block.self_attn.kv_b_proj",
    ),
    Arch(
        name="deepseek32",
        family="deepseek_v32",
        names=names(_ROLES, _INPUT_NORM, _FFN_NORM, _MLA, _INDEXER, _SIGMOID_MOE),
        kv_b="block.self_attn.kv_b_proj",
    ),
    Arch(
        name="glm-dsa",
        family="glm_moe_dsa",
        names=names(_ROLES, _INPUT_NORM, _FFN_NORM, _MLA, _INDEXER, _SIGMOID_MOE),
        kv_b="block.self_attn.kv_b_proj",
    ),
    Arch(
        name="mimo2",
        family="mimo_v2",
        names=names(
            _ROLES,
            _INPUT_NORM,
            _GQA,
            _DENSE,
            _LAYER_OUT_NORM,
            """
            block.pre_mlp_layernorm               ffn_norm
            block.self_attn.attention_sink_bias   attn_sinks.weight
            """,
        ),
        layer_values=_mimo_values,
    ),
    Arch(
        name="step35",
        family="step3p5",
        names=names(
            _ROLES, _INPUT_NORM, _FFN_NORM, _GQA, _DENSE, "block.self_attn.g_proj attn_gate"
        ),
        shifts_norms=True,
        layer_values=_step_values,
    ),
    Arch(
        name="hy_v3",
        family="hy_v3",
        names=names(
            _ROLES,
            _INPUT_NORM,
            _FFN_NORM,
            _GQA,
            _STACKS,
            """
            block.mlp.router.gate              ffn_gate_inp
            block.mlp.expert_bias              exp_probs_b.bias
            block.mlp.shared_mlp.gate_proj     ffn_gate_shexp
            block.mlp.shared_mlp.up_proj       ffn_up_shexp
            block.mlp.shared_mlp.down_proj     ffn_down_shexp
            """,
        ),
    ),
    Arch(
        name="nemotron_h_moe",
        family="nemotron_h",
        names=names(
            _ROLES,
            """
            block.0.norm                           attn_norm
            block.0.mixer.q_proj                   attn_q
            block.0.mixer.k_proj                   attn_k
            block.0.mixer.v_proj                   attn_v
            block.0.mixer.o_proj                   attn_output
            block.1.norm                           post_attention_norm
            block.1.mixer.gate                     ffn_gate_inp
            block.1.mixer.gate.e_score_correction_bias   exp_probs_b.bias
            block.1.mixer.experts.up_proj          ffn_up_exps
            block.1.mixer.experts.down_proj        ffn_down_exps
            block.1.mixer.shared_experts.up_proj     ffn_up_shexp
            block.1.mixer.shared_experts.down_proj   ffn_down_shexp
            block.1.mixer.fc1_latent_proj          ffn_latent_down
            block.1.mixer.fc2_latent_proj          ffn_latent_up
            """,
        ),
        paired=("attn_q.weight", "attn_k.weight"),
        max_modules=1,
        layer_values=_nemotron_values,
    ),
    Arch(
        name="exaone-moe",
        family="exaone_moe",
        names=names(_ROLES, _INPUT_NORM, _FFN_NORM, _GQA, _DENSE),
        shares_roles=True,
        tolerates_missing=False,
    ),
    Arch(
        name="exaone4",
        family="exaone4_5",
        names=names(
            _ROLES,
            _POST_NORM,
            _GQA,
            _DENSE,
            "block.post_feedforward_layernorm post_ffw_norm",
        ),
        shares_roles=True,
        tolerates_missing=False,
    ),
    Arch(
        name="bailingmoe2",
        family="bailing_moe",
        names=names(
            _ROLES,
            _INPUT_NORM,
            _FFN_NORM,
            _EXPERTS,
            _SHARED,
            _LAYER_OUT_NORM,
            """
            block.attention.query_key_value   attn_qkv
            block.attention.dense             attn_output
            block.attention.query_layernorm   attn_q_norm
            block.attention.key_layernorm     attn_k_norm
            block.mlp.gate.expert_bias        exp_probs_b.bias
            """,
        ),
        tolerates_missing=False,
    ),
    Arch(
        name="bailingmoe3",
        family="bailing_moe_v3",
        names=names(
            _ROLES,
            _INPUT_NORM,
            _FFN_NORM,
            _EXPERTS,
            _SHARED,
            _LAYER_OUT_NORM,
            _LATENT.format(at="block.attention"),
            """
            block.attention.dense        attn_output
            block.attention.g_proj       attn_gate
            block.mlp.gate.expert_bias   exp_probs_b.bias
            """,
        ),
        kv_b="block.attention.kv_b_proj",
        layer_values=_BAILING_VALUES,
    ),
)

# family -> why its heads are not spelled here
REFUSED: Mapping[str, str] = {
    "mimo": "llama.cpp does not know MiMo-7B's head: its converter leaves it out "
    "(ggml-org/llama.cpp#13236 was closed)",
    "ernie4_5_moe": "llama.cpp's converter leaves ERNIE's head out",
    "deepseek_v3": "llama.cpp's converter leaves the head of DeepSeek-V3 out, and its loader was "
    "made for GLM-4.7-Flash",
    "deepseek_v4": "its fusion is stored as one Q8_0 matrix and its experts as MXFP4, which is not "
    "written here; use llama.cpp's own converter with --mtp",
    "dots3_note": "llama.cpp multiplies two of its norms by a constant and does not draft with it",
    "minimax_m3": "llama.cpp does not keep the head of MiniMax-M3",
    "gemma4_assistant": "an assistant is converted whole, by llama.cpp's own converter",
}


def arch_of(family_name: str) -> Arch | None:
    return next((arch for arch in ARCHS if arch.family == family_name), None)


def arch_named(name: str) -> Arch | None:
    return next((arch for arch in ARCHS if arch.name == name), None)


def reason_against(family_name: str) -> str:
    """Why there is no GGUF of a family's heads."""
    return REFUSED.get(family_name, "llama.cpp does not know its head, as far as is known here")
