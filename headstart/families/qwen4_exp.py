"""Qwen3.8-Flash-Next: the head carries the trunk's residual streams, with two projections."""

from __future__ import annotations

from collections.abc import Mapping

from headstart.errors import UnsupportedFamily
from headstart.families.base import Family, HeadLayout, Part, Trunk, parts
from headstart.families.blocks import GATED_GQA, QWEN_MOE
from headstart.families.cautions import Caution
from headstart.families.dims import Fields, at, dims
from headstart.families.names import KeyMap
from headstart.families.ngrams import num_heads, table_rows
from headstart.families.parameters import parameters
from headstart.families.qwen import LM_HEADS, PREFIXES, SPLIT_DELTA_NET, VISION, layer_type
from headstart.families.runtime import Runtime

_MIXER = """
    {at}hc_norm.weight                 hc*hidden
    {at}input_mix_weight_down.weight   hc_rank     hc*hidden
    {at}input_mix_weight_up.weight     hc*hidden   hc_rank
"""
_INJECTED = _MIXER + "{at}block_inject_weight.weight   hc   hc*hidden\n"
_HYPER = parts(
    _INJECTED.format(at="attn_hyper_connection.") + _INJECTED.format(at="mlp_hyper_connection.")
)
_INDEXER = parts("""
    self_attn.indexer.index_qk_proj.weight   index_heads*index_dim+index_kv*index_dim   hidden
    self_attn.indexer.q_layernorm.weight     index_dim
    self_attn.indexer.k_layernorm.weight     index_dim
""")
_NGRAMS = parts("""
    ple.key_proj.weight     hc*hidden   ple_dim
    ple.value_proj.weight   hidden      ple_dim
    ple.norm_key.weight     hc*hidden
    ple.norm_query.weight   hc*hidden
    ple.norm_conv.weight    hc*hidden
    ple.conv1d.weight       hc*hidden   1   ple_conv
""")
# what the published class takes where a config is silent
_NGRAM_DEFAULTS = {
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "seed": 1234,
    "split_ngram_parts": 512,
}
_ATTENTION = GATED_GQA + _INDEXER + _HYPER + QWEN_MOE


def _kind(fields: Fields, layer: int) -> str:
    """Layers with attention are called `indexed_attention` or `full_attention`."""
    kind = "recurrent" if layer_type(fields, layer) == "linear_attention" else "attention"
    has_ngrams = layer + 1 in (fields.get("ple_layer_ids") or ())
    return f"{kind}_with_ngrams" if has_ngrams else kind


_RECURRENT = SPLIT_DELTA_NET + _HYPER + QWEN_MOE
_TABLE = "ple.ple_embedding.ngram_embedding.shard_{shard}.weight"


def _kinds(fields: Fields) -> Mapping[str, tuple[Part, ...]]:
    """The layer with n-grams has a table of as many rows as primes add up to."""
    kinds = {"attention": _ATTENTION, "recurrent": _RECURRENT}
    if not fields.get("ple_layer_ids"):
        return kinds
    known = {**_NGRAM_DEFAULTS, **{k: value for k, value in fields.items() if value is not None}}
    sizes = dims(known)
    whole = sizes.get("ple_dim") or sizes.get("hidden")
    # Where no size is given, it is not checked.
    size = whole // num_heads(known) if whole else "hidden"
    rows = table_rows(known) // int(known["split_ngram_parts"])
    table = parts(f"{_TABLE} {rows} {size}")
    return {**kinds, "recurrent_with_ngrams": _RECURRENT + _NGRAMS + table}


def _normalised(fields: Fields) -> Fields:
    """Layers that choose what they see are called by several names."""
    listed = fields.get("layer_types")
    if not isinstance(listed, list):
        count = int(fields.get("num_hidden_layers") or 0)
        listed = [layer_type(fields, layer) for layer in range(count)]
    listed = ["full_attention" if kind in _CHOOSING else kind for kind in listed]
    with_ngrams = [n for n in fields.get("ple_layer_ids") or () if n <= len(listed)]
    if any(n < 1 or listed[n - 1] != "linear_attention" for n in with_ngrams):
        raise UnsupportedFamily(
            f"ple_layer_ids is {fields['ple_layer_ids']}; the engine adds an embedding of several "
            "tokens in recurrent layers only, as the published class does."
        )
    dim = fields.get("ple_embed_dim") or fields.get("hidden_size")
    theta = at(fields, "mtp.rope_theta")
    return {"layer_types": listed, "ple_embed_dim": dim, "head_rope_theta": theta}


_CHOOSING = ("indexed_attention", "qwen_sparse_attention")

FAMILY = Family(
    name="qwen4_exp",
    title="Qwen3.8-Flash-Next",
    model_types=("qwen4_exp", "qwen4_exp_text"),
    architectures=("Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM"),
    # releases say it as text_config.mtp.num_hidden_layers, vLLM reads this
    count_field="mtp_num_hidden_layers",
    keys=KeyMap(
        {
            "mtp.pre_fc_norm_embedding.{rest}": "modules.0.embed_norm.{rest}",
            "mtp.pre_fc_norm_hidden.{rest}": "modules.0.hidden_norm.{rest}",
            "mtp.fc_embedding.{rest}": "modules.0.fuse_embed.{rest}",
            "mtp.fc_hidden.{rest}": "modules.0.fuse_hidden.{rest}",
            "mtp.hyper_connection_mixer.{rest}": "modules.0.hc_head.{rest}",
            "mtp.layers.{module}.{rest}": "modules.{module}.block.{rest}",
        },
        roots=("", "model."),
        unread=("model.",),
    ),
    layout=HeadLayout(
        fuse_order="summed",  # fc_embedding(e) is added to fc_hidden of every stream
        zero_centred_norms=True,
        trunk_hidden="before_hc_head",
        recycled_hidden="streams",
        out_norm="none",  # the head's own mixer gives the state for the LM head
    ),
    head=parts(
        """
        embed_norm.weight    hidden
        hidden_norm.weight   hc*hidden
        fuse_embed.weight    hidden   hidden
        fuse_hidden.weight   hidden   hidden
        """
        + _MIXER.format(at="hc_head.")
    ),
    block=lambda fields: _ATTENTION,
    block_kind="attention",
    trunk=Trunk(
        prefixes=PREFIXES,
        lm_heads=LM_HEADS,
        final_norm="",  # the mixer takes its place
        hc_head="hyper_connection_mixer.",
        kinds={"attention": _ATTENTION, "recurrent": _RECURRENT},
        kinds_of=_kinds,
        kind_of=_kind,
        extras=parts(_MIXER.format(at="hyper_connection_mixer.")),
        beside=VISION,
    ),
    kv_elements="kv_heads*head_dim+kv_heads*head_dim+index_kv*index_dim",
    looked_up_as={"vllm": "mtp.layers.{module}.", "sglang": "model.layers.{layer}."},
    served={"vllm": "0.29.0", "sglang": "0.5.20"},
    cautions=(
        Caution(
            engine="vllm",
            is_occasional=True,
            text="spells in which no draft is accepted (vllm-project/vllm#55357, open)",
        ),
    ),
    elsewhere=(
        "mlx-vlm from 0.7.0 (a drafter's folder that its own splitter makes)",
        "ik_llama.cpp from pull request 2369",
    ),
    is_complete=True,
    runtime=Runtime(
        defaults={
            "partial_rotary_factor": 0.25,
            "head_dim": 256,
            "linear_conv_kernel_dim": 4,
            "use_qk_norm": True,
            "indexer_kv_heads": 1,
            "max_position_embeddings": 32768,
            **_NGRAM_DEFAULTS,
        },
        normalise=_normalised,
        partial_rotary=True,
        gated_attention=True,
        output_bias=True,
        streams="gated",
        parameters=parameters("""
            mlp.shared.gate_up.weight   mlp.shared_expert.{gate,up}_proj.weight
            mlp.shared.down.weight      mlp.shared_expert.down_proj.weight
        """),
        has_gpu_kernels=False,
    ),
    notes=(
        "the fusion has two projections and no concatenation; one norm goes over all streams",
        "norm names do not all end in norm.weight: rules that add 1 by name miss some",
        "vLLM refuses --mamba-cache-mode all for it",
        "experts are 640 wide, which limits tensor parallel and block sizes",
        "official FP8 releases split the experts; NVIDIA's NVFP4 keeps the head's in FP8",
    ),
)
