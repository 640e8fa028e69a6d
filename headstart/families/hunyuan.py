"""Hunyuan 3: an appended MoE layer with `final_layernorm`, embedding and LM head from the trunk."""

from __future__ import annotations

from headstart.families.base import Family, HeadLayout, Trunk
from headstart.families.blocks import ROLES
from headstart.families.cautions import Caution
from headstart.families.deepseek import dense_then_moe
from headstart.families.keymaps import appended_layer

FAMILY = Family(
    name="hy_v3",
    title="Hunyuan 3 (Hy3-preview)",
    model_types=("hy_v3",),
    architectures=("HYV3ForCausalLM",),
    # A stored head is `shared_head.weight` or `shared_head.head.weight`; engines read neither.
    keys=appended_layer(out_norm="final_layernorm", lm_head="shared_head"),
    layout=HeadLayout(deviations={"vllm": {"zero_embed_at_position_0": True}}),
    head=ROLES,
    # No block table: the router is mlp.router.gate in some checkpoints, mlp.gate.wg in others.
    block_kind="moe",
    copies=("embed_tokens", "lm_head"),
    trunk=Trunk(kind_of=dense_then_moe),
    looked_up_as={"vllm": "model.layers.{layer}."},
    served={"vllm": "0.20.0", "sglang": "0.5.11", "llamacpp": "b9993"},
    cautions=(
        Caution(
            engine="sglang",
            since="0.5.11",
            before="0.5.16",
            text="final_layernorm is not loaded (shared_head.norm is looked for), so few drafts "
            "are accepted; use 0.5.16 or later",
        ),
    ),
    notes=("an embedding or LM head stored in the head is ignored; the trunk's are used",),
)
