"""DeepSeek-V4: names without `model.`, several residual streams, two added fusion projections."""

from __future__ import annotations

from collections.abc import Mapping

from headstart.errors import BadConfig, UnsupportedFamily, some
from headstart.families.base import Family, HeadLayout, Part, Trunk, parts
from headstart.families.blocks import HYPER
from headstart.families.cautions import Caution
from headstart.families.dims import Fields
from headstart.families.names import KeyMap
from headstart.families.parameters import parameters
from headstart.families.runtime import Runtime

_ATTENTION = HYPER + parts("""
    attn_norm.weight                     hidden
    ffn_norm.weight                      hidden
    attn.wq_a.weight                     q_rank             hidden
    attn.q_norm.weight                   q_rank
    attn.wq_b.weight                     heads*head_dim     q_rank
    attn.wkv.weight                      head_dim           hidden
    attn.kv_norm.weight                  head_dim
    attn.wo_a.weight                     o_groups*o_rank    heads_per_group*head_dim
    attn.wo_b.weight                     hidden             o_groups*o_rank
    attn.attn_sink                       heads
""")
_EXPERTS = parts("""
    ffn.gate.weight                      experts            hidden
    ffn.experts.{expert}.w1.weight       moe_width          hidden
    ffn.experts.{expert}.w2.weight       hidden             moe_width
    ffn.experts.{expert}.w3.weight       moe_width          hidden
    ffn.shared_experts.w1.weight         shared_width       hidden
    ffn.shared_experts.w2.weight         hidden             shared_width
    ffn.shared_experts.w3.weight         shared_width       hidden
""")
_FEEDS = {
    "moe": _EXPERTS + parts("ffn.gate.bias experts"),
    "hash_moe": _EXPERTS + parts("ffn.gate.tid2eid vocab top_k"),
}
_BLOCK = _ATTENTION + _FEEDS["moe"]  # sees near tokens only

# What a layer adds to see far tokens as entries of windows; those that choose windows make entries
# twice as wide, and have an indexer with windows of its own.
_WINDOWS = """
    {at}.wkv.weight     {wide}   hidden
    {at}.wgate.weight   {wide}   hidden
    {at}.ape            {size}   {wide}
    {at}.norm.weight    {dim}
"""
_INDEXER = parts("""
    attn.indexer.wq_b.weight           index_heads*index_dim   q_rank
    attn.indexer.weights_proj.weight   index_heads             hidden
""")
_NEAR, _CHOSEN = "sliding_attention", "compressed_sparse_attention"
_FAR = "heavily_compressed_attention"
_RATES = {_CHOSEN: 4, _FAR: 128}
_SEES = {0: _NEAR, 1: _NEAR, 4: _CHOSEN, 128: _FAR}  # by compress_ratios


def _sizes(fields: Fields) -> dict[str, int]:
    """Of windows, by what transformers calls a layer."""
    given = fields.get("compress_rates")
    rates = {**_RATES, **(given if isinstance(given, Mapping) else {})}
    return {name: int(rates[name]) for name in _RATES}


def _seen(fields: Fields, layer: int) -> str:
    """What a layer sees, by transformers' names; releases list how many tokens become one."""
    named, ratios = fields.get("layer_types"), fields.get("compress_ratios")
    if isinstance(named, list) and layer < len(named):
        return str(named[layer])
    if isinstance(ratios, list) and layer < len(ratios):
        return _SEES.get(ratios[layer], str(ratios[layer]))
    return _FAR if layer < 2 or layer % 2 == 0 else _CHOSEN


def _kind(fields: Fields, layer: int) -> str:
    feeds, first = fields.get("mlp_layer_types"), fields.get("num_hash_layers")
    if isinstance(feeds, list) and layer < len(feeds):
        feed = str(feeds[layer])
    else:
        feed = "hash_moe" if layer < (3 if first is None else int(first)) else "moe"
    return f"{_seen(fields, layer)}/{feed}"


def _kinds(fields: Fields) -> Mapping[str, tuple[Part, ...]]:
    sizes = _sizes(fields)
    near, at = _ATTENTION, "attn.compressor"
    choosing, far = (sizes[name] for name in _RATES)
    sparse = _WINDOWS.format(at=at, wide="2*head_dim", dim="head_dim", size=choosing)
    index = _WINDOWS.format(
        at="attn.indexer.compressor", wide="2*index_dim", dim="index_dim", size=choosing
    )
    heavy = _WINDOWS.format(at=at, wide="head_dim", dim="head_dim", size=far)
    attends = {
        _NEAR: near,
        _CHOSEN: near + parts(sparse + index) + _INDEXER,
        _FAR: near + parts(heavy),
    }
    return {f"{a}/{f}": own + feed for a, own in attends.items() for f, feed in _FEEDS.items()}


def _normalised(fields: Fields) -> Fields:
    """One list of windows' sizes, and limits of all experts."""
    count = int(fields.get("num_hidden_layers") or 0)
    kinds = [_seen(fields, layer) for layer in range(count)]
    if unknown := sorted({*kinds} - {*_SEES.values()}):
        raise UnsupportedFamily(
            f"layers see {some(unknown)} (layer_types, compress_ratios); the engine computes "
            "deepseek_v4 with windows of 4 (chosen) and 128 tokens, and without, as releases have."
        )
    sizes = {_NEAR: 0, **_sizes(fields)}
    if any(sizes[name] < 1 for name in _RATES):
        raise BadConfig(f"compress_rates is {fields['compress_rates']!r}; expected sizes above 0.")
    rotated = fields.get("qk_rope_head_dim")
    if rotated is None and fields.get("partial_rotary_factor"):
        rotated = int(int(fields["head_dim"]) * float(fields["partial_rotary_factor"]))
    most = [float(fields["swiglu_limit"])] * (count + 1)
    return {
        "compress_ratios": [sizes[name] for name in kinds],
        "qk_rope_head_dim": rotated or 64,
        "swiglu_limits": most,
        "swiglu_limits_shared": most,
        "num_key_value_heads": 1,
    }


FAMILY = Family(
    name="deepseek_v4",
    title="DeepSeek-V4 Flash, V4 Pro (original releases)",
    model_types=("deepseek_v4",),
    architectures=("DeepseekV4ForCausalLM",),
    keys=KeyMap(
        {
            "mtp.{module}.enorm.{rest}": "modules.{module}.embed_norm.{rest}",
            "mtp.{module}.hnorm.{rest}": "modules.{module}.hidden_norm.{rest}",
            "mtp.{module}.e_proj.{rest}": "modules.{module}.fuse_embed.{rest}",
            "mtp.{module}.h_proj.{rest}": "modules.{module}.fuse_hidden.{rest}",
            "mtp.{module}.norm.{rest}": "modules.{module}.out_norm.{rest}",
            "mtp.{module}.hc_head_{rest}": "modules.{module}.hc_head.{rest}",
            "mtp.{module}.head.{rest}": "modules.{module}.lm_head.{rest}",
            "mtp.{module}.emb.tok_emb.{rest}": "modules.{module}.embed_tokens.{rest}",
            "mtp.{module}.{rest}": "modules.{module}.block.{rest}",
        }
    ),
    layout=HeadLayout(
        fuse_order="summed",  # e_proj(e) + h_proj(h), added to every stream
        trunk_hidden="before_hc_head",
        recycled_hidden="streams",
        deviations={"vllm": {"zero_embed_at_position_0": True}},
    ),
    head=parts("""
        embed_norm.weight    hidden
        hidden_norm.weight   hidden
        fuse_embed.weight    hidden   hidden
        fuse_hidden.weight   hidden   hidden
        out_norm.weight      hidden
        hc_head.fn           hc       hc*hidden
        hc_head.base         hc
        hc_head.scale        1
    """),
    block=lambda fields: _BLOCK,
    block_kind=f"{_NEAR}/moe",
    copies=("embed_tokens", "lm_head"),
    trunk=Trunk(
        prefixes=("",),
        embed="embed.weight",
        lm_heads=("head.weight",),
        kinds_of=_kinds,
        kind_of=_kind,
        extras=parts("""
            hc_head_fn      hc   hc*hidden
            hc_head_base    hc
            hc_head_scale   1
        """),
    ),
    kv_elements="head_dim",  # one latent KV head
    looked_up_as={"vllm": "model.layers.{layer}."},
    also_asked_as={
        "fuse_embed": ("model.layers.{layer}.e_proj", "model.e_proj"),
        "fuse_hidden": ("model.layers.{layer}.h_proj", "model.h_proj"),
        "block.attn": ("model.decoder.self_attn",),  # SGLang
        "block.ffn": ("model.decoder.mlp",),
    },
    served={
        "vllm": "0.20.0",
        "sglang": "0.5.12",
        "trtllm": "1.3.0rc20 Blackwell GPUs only",
        "xllm": "0.10.0",
    },
    elsewhere=("mlx-vlm from 0.6.15 (a drafter's folder that its own splitter makes)",),
    cautions=(
        Caution(
            engine="vllm",
            is_occasional=True,
            text="without copies of embedding and LM head inside the head (mtp.0.head, mtp.0.emb) "
            "it drafts with uninitialised ones (vllm-project/vllm#43456)",
        ),
    ),
    is_complete=True,
    is_quantized_by_layout=True,
    runtime=Runtime(
        defaults={
            "rms_norm_eps": 1e-6,
            "head_dim": 512,
            "scoring_func": "sqrtsoftplus",
            "routed_scaling_factor": 1.5,
            "n_shared_experts": 1,
            "swiglu_limit": 10.0,
            "sliding_window": 128,
            "rope_theta": 10000.0,
            "compress_rope_theta": 160000.0,
            "max_position_embeddings": 1048576,
        },
        fixed={"limits_before_activation": True},
        normalise=_normalised,
        streams="balanced",
        parameters=parameters("""
            attention_norm.weight                   attn_norm.weight
            attention.compress.weight               attn.{wq_a,wkv}.weight
            attention.q_latent_norm.weight          attn.q_norm.weight
            attention.q_up.weight                   attn.wq_b.weight
            attention.kv_norm.weight                attn.kv_norm.weight
            attention.sinks                         attn.attn_sink
            attention.o_groups                      attn.wo_a.weight
            attention.o.weight                      attn.wo_b.weight
            attention.windows.kv.weight             attn.compressor.{wkv,wgate}.weight
            attention.windows.bias                  attn.compressor.ape
            attention.windows.norm.weight           attn.compressor.norm.weight
            attention.indexer.q_up.weight           attn.indexer.wq_b.weight
            attention.indexer.weights.weight        attn.indexer.weights_proj.weight
            attention.indexer.windows.kv.weight     attn.indexer.compressor.{wkv,wgate}.weight
            attention.indexer.windows.bias          attn.indexer.compressor.ape
            attention.indexer.windows.norm.weight   attn.indexer.compressor.norm.weight
            mlp_norm.weight                         ffn_norm.weight
            mlp.router.weight                       ffn.gate.weight
            mlp.router.correction                   ffn.gate.bias
            mlp.router.by_token                     ffn.gate.tid2eid
            mlp.experts.gate_up.weight              ffn.experts.{expert}.{w1,w3}.weight
            mlp.experts.down.weight                 ffn.experts.{expert}.w2.weight
            mlp.shared.gate_up.weight               ffn.shared_experts.{w1,w3}.weight
            mlp.shared.down.weight                  ffn.shared_experts.w2.weight
        """),
        has_gpu_kernels=False,
    ),
    notes=(
        "layers that see near tokens only rotate by rope_theta and without YaRN (transformers, "
        "SGLang, llama.cpp, vLLM 0.32.0 and here); vLLM of 2026-08-22 stretches them, too",
        "the engine keeps what windows are made from, of every token: 3072 numbers in a layer that "
        "chooses windows, 1536 in one that sees all of them, 512 in others (V4 Flash)",
        "llama.cpp drafts with it from b10228 on",
        "re-releases with dspark_* config keys store a DSpark drafter under mtp.*, not a head",
        "scales are E8M0 beside FP4 experts: copied bit for bit",
        "the base release stores copies of embedding and LM head in the head (emb.tok_emb, head)",
    ),
)
