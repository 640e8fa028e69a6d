"""Motif-3: hidden state first and without a norm of its own, in a dense layer that slides."""

from __future__ import annotations

from headstart.families.base import Family, HeadLayout, Trunk, parts
from headstart.families.blocks import DENSE_MLP, NORMS
from headstart.families.names import KeyMap

# grouped differential latent attention; the activation of the MLP has weights (PolyNorm)
_LAYER = (
    NORMS
    + DENSE_MLP
    + parts("""
    self_attn.wq_a.weight          q_rank                             hidden
    self_attn.q_norm.weight        q_rank
    self_attn.wq_b.weight          heads*head_dim                     q_rank
    self_attn.wq_b_gate.weight     signal_heads*v_dim                 q_rank
    self_attn.wkv_a.weight         kv_rank+rope_dim                   hidden
    self_attn.kv_norm.weight       kv_rank
    self_attn.wkv_b.weight         kv_heads*nope_dim+kv_heads*v_dim   kv_rank
    self_attn.lambda_proj.weight   signal_heads                       hidden
    self_attn.wo.weight            hidden                             signal_heads*v_dim
    mlp.act_fn.weight              3
    mlp.act_fn.bias                1
""")
)

FAMILY = Family(
    name="motif",
    title="Motif-3 (Beta)",
    model_types=("motif",),
    architectures=("MotifForCausalLM",),
    keys=KeyMap(
        {
            "model.mtp_layers.{module}.embed_norm.{rest}": "modules.{module}.embed_norm.{rest}",
            "model.mtp_layers.{module}.input_proj.{rest}": "modules.{module}.fuse.{rest}",
            "model.mtp_layers.{module}.final_layernorm.{rest}": "modules.{module}.out_norm.{rest}",
            "model.mtp_layers.{module}.{rest}": "modules.{module}.block.{rest}",
        }
    ),
    layout=HeadLayout(fuse_order="hidden_first", normalises_hidden=False),
    head=parts("""
        embed_norm.weight   hidden
        fuse.weight         hidden   2*hidden
        out_norm.weight     hidden
    """),
    block=lambda fields: _LAYER,
    block_kind="dense",
    # Trunk layers may add streams with hyper-connections and experts to this.
    trunk=Trunk(kinds={"dense": _LAYER}),
    kv_elements="kv_heads*head_dim+kv_heads*v_dim",
    elsewhere=("Motif's own fork of vLLM",),
    is_complete=True,
    lacks="grouped differential latent attention, PolyNorm, and several residual streams",
    notes=(
        "names begin as those of MiMo-7B and Hunyuan 4 do: embed_norm tells it from both",
        "the hidden state is not normalised again; a converter that adds a norm breaks the head",
        "the window is that of the trunk and one token more, with swa_rope_theta and no YaRN",
    ),
)
