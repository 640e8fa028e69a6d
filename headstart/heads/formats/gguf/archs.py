"""How llama.cpp spells the heads of each family: architecture, names, value changes, builds.

A head is blocks behind those of the trunk: `blk.{L+i}.nextn.*` for the tensors around the block,
the names of any layer for the rest. Facts are those of llama.cpp's converter (conversion/) and
loader (src/models/) at build b10586.
"""

from __future__ import annotations

from collections.abc import Mapping

from headstart.heads.formats.gguf.arch import Arch, KeysOf
from headstart.heads.formats.gguf.arch_names import (
    DENSE,
    EXPERTS,
    FFN_NORM,
    GQA,
    INDEXER,
    INPUT_NORM,
    LATENT,
    LAYER_OUT_NORM,
    MLA,
    POST_NORM,
    QWEN_MOE,
    ROLES,
    SHARED,
    SIGMOID_MOE,
    STACKS,
    names,
)
from headstart.heads.formats.gguf.keys import (
    glm_sparse_keys,
    hunyuan_keys,
    latent_keys,
    qwen_keys,
    qwen_next_keys,
    sparse_keys,
    step_keys,
)
from headstart.heads.formats.gguf.layer_values import (
    bailing_values,
    mimo_values,
    nemotron_values,
    qwen_values,
    step_values,
)


def _qwen(
    name: str, family: str, feed: str, keys_of: KeysOf = qwen_keys, pre_tokenizer: str = "qwen35"
) -> Arch:
    return Arch(
        name=name,
        family=family,
        names=names(ROLES, INPUT_NORM, POST_NORM, GQA, feed),
        shifts_norms=True,
        tolerates_missing=False,
        max_modules=1,
        layer_values=qwen_values,
        keys_of=keys_of,
        pre_tokenizer=pre_tokenizer,
    )


ARCHS: tuple[Arch, ...] = (
    _qwen("qwen3next", "qwen3_next", QWEN_MOE, qwen_next_keys, "qwen2"),
    _qwen("qwen35", "qwen3_5", DENSE),
    _qwen("qwen35moe", "qwen3_5_moe", QWEN_MOE),
    Arch(
        name="glm4moe",
        family="glm4_moe",
        names=names(ROLES, INPUT_NORM, POST_NORM, GQA, SIGMOID_MOE),
        tolerates_missing=False,
    ),
    Arch(
        name="glm4",
        is_shared=True,
        family="glm_ocr",
        names=names(
            ROLES,
            INPUT_NORM,
            FFN_NORM,
            GQA,
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
        is_shared=True,
        family="glm4_moe_lite",
        names=names(ROLES, INPUT_NORM, FFN_NORM, MLA, SIGMOID_MOE),
        kv_b="block.self_attn.kv_b_proj",
        keys_of=latent_keys,
        pre_tokenizer="glm4",
    ),
    Arch(
        name="deepseek32",
        family="deepseek_v32",
        names=names(ROLES, INPUT_NORM, FFN_NORM, MLA, INDEXER, SIGMOID_MOE),
        kv_b="block.self_attn.kv_b_proj",
        keys_of=sparse_keys,
        pre_tokenizer="deepseek-v3",
    ),
    Arch(
        name="glm-dsa",
        family="glm_moe_dsa",
        names=names(ROLES, INPUT_NORM, FFN_NORM, MLA, INDEXER, SIGMOID_MOE),
        kv_b="block.self_attn.kv_b_proj",
        keys_of=glm_sparse_keys,
        pre_tokenizer="glm4",
    ),
    Arch(
        name="mimo2",
        family="mimo_v2",
        names=names(
            ROLES,
            INPUT_NORM,
            GQA,
            DENSE,
            LAYER_OUT_NORM,
            """
            block.pre_mlp_layernorm               ffn_norm
            block.self_attn.attention_sink_bias   attn_sinks.weight
            """,
        ),
        layer_values=mimo_values,
    ),
    Arch(
        name="step35",
        family="step3p5",
        names=names(ROLES, INPUT_NORM, FFN_NORM, GQA, DENSE, "block.self_attn.g_proj attn_gate"),
        shifts_norms=True,
        layer_values=step_values,
        keys_of=step_keys,
        pre_tokenizer="deepseek-v3",
    ),
    Arch(
        name="hy_v3",
        family="hy_v3",
        names=names(
            ROLES,
            INPUT_NORM,
            FFN_NORM,
            GQA,
            STACKS,
            """
            block.mlp.router.gate              ffn_gate_inp
            block.mlp.expert_bias              exp_probs_b
            block.mlp.shared_mlp.gate_proj     ffn_gate_shexp
            block.mlp.shared_mlp.up_proj       ffn_up_shexp
            block.mlp.shared_mlp.down_proj     ffn_down_shexp
            """,
        ),
        keys_of=hunyuan_keys,
    ),
    Arch(
        name="nemotron_h_moe",
        family="nemotron_h",
        names=names(
            ROLES,
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
        layer_values=nemotron_values,
    ),
    Arch(
        name="exaone-moe",
        family="exaone_moe",
        names=names(ROLES, INPUT_NORM, FFN_NORM, GQA, DENSE),
        shares_roles=True,
        tolerates_missing=False,
    ),
    Arch(
        name="exaone4",
        is_shared=True,
        family="exaone4_5",
        names=names(
            ROLES,
            POST_NORM,
            GQA,
            DENSE,
            "block.post_feedforward_layernorm post_ffw_norm",
        ),
        shares_roles=True,
        tolerates_missing=False,
    ),
    Arch(
        name="bailingmoe2",
        family="bailing_moe",
        names=names(
            ROLES,
            INPUT_NORM,
            FFN_NORM,
            EXPERTS,
            SHARED,
            LAYER_OUT_NORM,
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
            ROLES,
            INPUT_NORM,
            FFN_NORM,
            EXPERTS,
            SHARED,
            LAYER_OUT_NORM,
            LATENT.format(at="block.attention"),
            """
            block.attention.dense        attn_output
            block.attention.g_proj       attn_gate
            block.mlp.gate.expert_bias   exp_probs_b.bias
            """,
        ),
        kv_b="block.attention.kv_b_proj",
        layer_values=bailing_values,
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
