"""Nemotron-H: the head is a short pattern of sub-layers (attention, MoE) without rotary."""

from __future__ import annotations

from headstart.errors import BadConfig, UnsupportedFamily
from headstart.families.base import Family, HeadLayout, Part, Trunk, parts
from headstart.families.blocks import ROLES
from headstart.families.dims import Fields
from headstart.families.names import KeyMap
from headstart.families.parameters import parameters
from headstart.families.runtime import Runtime

_NORM = parts("norm.weight hidden")
_ATTENTION = _NORM + parts("""
    mixer.q_proj.weight   heads*head_dim      hidden
    mixer.k_proj.weight   kv_heads*head_dim   hidden
    mixer.v_proj.weight   kv_heads*head_dim   hidden
    mixer.o_proj.weight   hidden              heads*head_dim
""")
_ROUTER = parts("""
    mixer.gate.weight                      experts                       hidden
    mixer.gate.e_score_correction_bias     experts
    mixer.shared_experts.up_proj.weight    shared_experts*shared_width   hidden
    mixer.shared_experts.down_proj.weight  hidden                        shared_experts*shared_width
""")
# Ungated experts; with a latent size they work in a smaller space.
_MOE = (
    _NORM
    + _ROUTER
    + parts("""
    mixer.experts.{expert}.up_proj.weight     moe_width   latent      if moe_latent_size
    mixer.experts.{expert}.down_proj.weight   latent      moe_width   if moe_latent_size
    mixer.fc1_latent_proj.weight              latent      hidden      if moe_latent_size
    mixer.fc2_latent_proj.weight              hidden      latent      if moe_latent_size
    mixer.experts.{expert}.up_proj.weight     moe_width   hidden      if !moe_latent_size
    mixer.experts.{expert}.down_proj.weight   hidden      moe_width   if !moe_latent_size
""")
)
_MLP = _NORM + parts("""
    mixer.up_proj.weight     intermediate   hidden
    mixer.down_proj.weight   hidden         intermediate
""")
_MAMBA = _NORM + parts("""
    mixer.in_proj.weight    2*mamba_heads*mamba_dim+2*groups*state+mamba_heads   hidden
    mixer.conv1d.weight     mamba_heads*mamba_dim+2*groups*state   1   conv
    mixer.conv1d.bias       mamba_heads*mamba_dim+2*groups*state   if use_conv_bias
    mixer.A_log             mamba_heads
    mixer.D                 mamba_heads
    mixer.dt_bias           mamba_heads
    mixer.norm.weight       mamba_heads*mamba_dim
    mixer.out_proj.weight   hidden   mamba_heads*mamba_dim
""")
_KINDS = {"attention": _ATTENTION, "moe": _MOE, "mlp": _MLP, "mamba": _MAMBA}
_LETTERS = {"*": "attention", "E": "moe", "-": "mlp", "M": "mamba"}
# as transformers writes them
_LISTED = {"full_attention": "attention", "linear_attention": "mamba"}


def _head_pattern(fields: Fields) -> list[str]:
    listed = fields.get("mtp_layers_block_type")
    if isinstance(listed, list) and listed:
        return [_known(_LISTED.get(str(kind), str(kind))) for kind in listed]
    letters = str(fields.get("mtp_hybrid_override_pattern") or "*E")
    return [_known(_LETTERS.get(letter, letter)) for letter in letters]


def _known(kind: str) -> str:
    if kind not in _KINDS:
        raise BadConfig(
            f"the config names the layer kind {kind!r}; expected one of {', '.join(_KINDS)} "
            f"(or {' '.join(_LETTERS)} in a pattern). Correct the pattern."
        )
    return kind


def _head_block(fields: Fields) -> tuple[Part, ...]:
    return tuple(
        Part(f"{j}.{part.name}", part.shape, part.when)
        for j, kind in enumerate(_head_pattern(fields))
        for part in _KINDS[kind]
    )


def _kind(fields: Fields, layer: int) -> str:
    listed = fields.get("layers_block_type")
    if not isinstance(listed, list):
        pattern = str(fields.get("hybrid_override_pattern") or "")
        listed = [_LETTERS.get(letter, letter) for letter in pattern]
    if layer >= len(listed):
        raise BadConfig(
            f"the layer pattern has {len(listed)} entries, fewer than there are layers."
        )
    return _known(_LISTED.get(str(listed[layer]), str(listed[layer])))


# Of a layer, which has one part; and of a head's block, whose two parts are layers of their own.
_PART = parameters("""
    attention_norm.weight        norm.weight
    attention.qkv.weight         mixer.{q,k,v}_proj.weight
    attention.o.weight           mixer.o_proj.weight
    attention.inputs.weight      mixer.in_proj.weight
    attention.conv               mixer.conv1d.weight
    attention.conv_bias          mixer.conv1d.bias
    attention.a_log              mixer.A_log
    attention.dt_bias            mixer.dt_bias
    attention.skip               mixer.D
    attention.norm               mixer.norm.weight
    attention.out.weight         mixer.out_proj.weight
    mlp_norm.weight              norm.weight
    mlp.up.weight                mixer.up_proj.weight
    mlp.down.weight              mixer.down_proj.weight
    mlp.router.weight            mixer.gate.weight
    mlp.router.correction        mixer.gate.e_score_correction_bias
    mlp.experts.up.weight        mixer.experts.{expert}.up_proj.weight
    mlp.experts.down.weight      mixer.experts.{expert}.down_proj.weight
    mlp.shared.up.weight         mixer.shared_experts.up_proj.weight
    mlp.shared.down.weight       mixer.shared_experts.down_proj.weight
    mlp.latent_in.weight         mixer.fc1_latent_proj.weight
    mlp.latent_out.weight        mixer.fc2_latent_proj.weight
""")
_HEAD_PARTS = {
    ours: tuple(f"{int(ours.startswith('mlp'))}.{name}" for name in theirs)
    for ours, theirs in _PART.items()
}
_RUN_HEADS = (["attention", "moe"], ["attention", "mlp"])


def _normalised(fields: Fields) -> Fields:
    """Refuse what is not computed; the width of all shared experts is that of one."""
    if fields.get("mlp_hidden_act") != "relu2" or fields.get("mamba_hidden_act") != "silu":
        raise UnsupportedFamily(
            f"mlp_hidden_act is {fields.get('mlp_hidden_act')!r} and mamba_hidden_act "
            f"{fields.get('mamba_hidden_act')!r}; the engine computes relu2 and silu for "
            "Nemotron-H, as its releases have them."
        )
    pattern = _head_pattern(fields)
    if pattern not in _RUN_HEADS:
        raise UnsupportedFamily(
            f"the head's layers are {', '.join(pattern)}; the engine runs one that attends and "
            "one with experts or an MLP, as in all releases (mtp_hybrid_override_pattern *E)."
        )
    width = fields.get("moe_shared_expert_intermediate_size")
    if not isinstance(width, int):
        return {}
    shared = int(fields.get("n_shared_experts") or 1)
    return {"moe_shared_expert_intermediate_size": shared * width, "n_shared_experts": 1}


FAMILY = Family(
    name="nemotron_h",
    title="Nemotron 3 Super, Ultra, 3.5 Lightning (Nemotron-H)",
    # wrappers keep it as their text part: with sound and pictures, or for transcripts
    model_types=("nemotron_h", "nemotron_h_puzzle", "nemotron_h_omni"),
    architectures=(
        "NemotronHForCausalLM",
        "NemotronHPuzzleForCausalLM",
        "NemotronH_Omni_Reasoning_V3",
        "NemotronH_Super_Omni_Reasoning_V3",
        "Nemotron3_5TranscribeForConditionalGeneration",
    ),
    keys=KeyMap(
        {
            "mtp.layers.0.enorm.{rest}": "modules.0.embed_norm.{rest}",
            "mtp.layers.0.hnorm.{rest}": "modules.0.hidden_norm.{rest}",
            "mtp.layers.0.eh_proj.{rest}": "modules.0.fuse.{rest}",
            "mtp.layers.{last}.final_layernorm.{rest}": "modules.0.out_norm.{rest}",
            "mtp.layers.{rest}": "modules.0.block.{rest}",
        },
        roots=("", "language_model.", "llm."),
    ),
    layout=HeadLayout(unsettled=("out_norm_mean",)),
    head=ROLES,
    block=_head_block,
    head_fields={"n_routed_experts": "mtp_n_routed_experts"},
    trunk=Trunk(
        prefixes=(
            "backbone.",
            "model.",
            "language_model.backbone.",
            "llm.backbone.",
            "llm.model.",
        ),
        embed="embeddings.weight",
        final_norm="norm_f.weight",
        lm_heads=("lm_head.weight", "language_model.lm_head.weight", "llm.lm_head.weight"),
        beside=("vision_model.", "sound_encoder.", "perception."),
        kinds=_KINDS,
        kind_of=_kind,
    ),
    num_sub_layers=lambda fields: len(_head_pattern(fields)),
    looked_up_as={"vllm": "mtp.layers.", "sglang": "mtp.layers."},
    served={
        "vllm": "0.17.0",
        "sglang": "0.5.8",
        "trtllm": "1.3.0rc9",
        "llamacpp": "b10344 its last norm subtracts the mean; latent experts are not loaded",
    },
    elsewhere=("mlx-vlm from 0.7.9 (a drafter's folder that its own splitter makes)",),
    variants={
        "vllm": {
            "nemotron_h_puzzle": "0.19.0",
            "NemotronH_Omni_Reasoning_V3": "0.29.0",
            "NemotronH_Super_Omni_Reasoning_V3": "0.20.0",
            "Nemotron3_5TranscribeForConditionalGeneration": None,
        },
        "sglang": {
            "nemotron_h_puzzle": "0.5.13",
            "NemotronH_Omni_Reasoning_V3": "0.5.20",
            "NemotronH_Super_Omni_Reasoning_V3": None,
            "Nemotron3_5TranscribeForConditionalGeneration": None,
        },
    },
    variant_titles={
        "NemotronH_Omni_Reasoning_V3": "Nemotron Omni",
        "NemotronH_Super_Omni_Reasoning_V3": "Nemotron Super Omni",
        "Nemotron3_5TranscribeForConditionalGeneration": "Nemotron 3.5 Transcribe",
    },
    is_complete=True,
    runtime=Runtime(
        model_types=("nemotron_h",),
        defaults={
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "layer_norm_epsilon": 1e-5,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "n_shared_experts": 1,
        },
        fixed={
            "hidden_act": "silu",
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        renamed={"layer_norm_epsilon": "rms_norm_eps"},
        normalise=_normalised,
        rotates=False,
        refused=dict.fromkeys(
            ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"),
            "the engine computes Nemotron-H without, as its releases are.",
        ),
        parameters=_PART,
        head_parameters=_HEAD_PARTS,
        has_gpu_kernels=False,
    ),
    lacks="layers of different widths (nemotron_h_puzzle)",
    disputed="the last norm (final_layernorm) is an RMS norm in vLLM, SGLang and mlx-vlm 0.7.9, "
    "and subtracts the mean in llama.cpp and gmlx",
    notes=(
        "time steps of Mamba layers have no limits, as in vLLM; transformers raises those of "
        "prompts to time_step_min, and not those of decoded tokens",
        "Transcribe: names begin with llm., NeMo's plugin counts in mtp.num_nextn_predict_layers",
        "llama.cpp has no latent projections in the head: Super and Ultra look unsupported there",
    ),
)
