"""The published config of a trunk, read back from the keys of a GGUF file.

Every key below the architecture's name must be one that is read here, or known to change nothing:
a file that asks for more than the engine computes is refused instead of giving wrong text. The
functions at the end are named by `trunks.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from headstart.checkpoint.gguf.fields import ARRAY
from headstart.checkpoint.gguf.values import floats_of
from headstart.checkpoint.source import stored
from headstart.errors import BadConfig, UnsupportedFamily, some
from headstart.heads.formats.gguf.model import GgufModel

Config = dict[str, Any]
# keys that say nothing which a config would
_NO_MATTER = (
    "block_count", "nextn_predict_layers", "vocab_size", "rope.scaling.finetuned",
    "tensor_data_layout", "attention.causal",
)  # fmt: skip
_GATING = {1: "softmax", 2: "sigmoid"}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip


class Keys:
    """The keys of a file below its architecture's name; what is never asked for is refused."""

    def __init__(self, model: GgufModel, num_layers: int):
        self.model, self.num_layers = model, num_layers
        self.layers = [model.blocks().get(layer, {}) for layer in range(num_layers)]
        self._asked = set(_NO_MATTER)

    def get(self, name: str) -> Any:
        self._asked.add(name)
        found = self.model.value(name)
        return shortest(found) if isinstance(found, float) else found

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number; BadConfig where it is none, or absent without a default."""
        found = self.get(name)
        found = default if found is None else found
        if type(found) is not int or found < 0:
            raise BadConfig(
                f"{self.model.folder}: {self.model.arch_name}.{name} is {str(found)[:60]}; "
                "expected a whole number. Convert the model again."
            )
        return found

    def each(self, name: str, default: Any = None) -> list[Any]:
        """One value for each layer of the trunk, and of the head's modules where there are any."""
        found = self.get(name)
        field = self.model.fields.get(f"{self.model.arch_name}.{name}")
        if field is None or field.kind != ARRAY:
            return [default if found is None else found] * self.num_layers
        if len(found) < self.num_layers:
            raise BadConfig(
                f"{self.model.folder}: {self.model.arch_name}.{name} has {len(found)} values; "
                f"expected one for each of {self.num_layers} layers. Convert the model again."
            )
        return [shortest(value) if isinstance(value, float) else value for value in found]

    def layers_with(self, tensor: str) -> list[int]:
        return [number for number, own in enumerate(self.layers) if tensor in own]

    def any_has(self, tensor: str) -> bool:
        return bool(self.layers_with(tensor))

    def refuse_others(self) -> None:
        """UnsupportedFamily for keys that nothing asked for."""
        prefix = f"{self.model.arch_name}."
        names = [n.removeprefix(prefix) for n in self.model.fields if n.startswith(prefix)]
        others = sorted(name for name in names if name not in self._asked)
        if others:
            raise UnsupportedFamily(
                f"{self.model.folder} sets {some(prefix + name for name in others)}, which is not "
                f"known of {self.model.arch_name} here: without it the text might be wrong. "
                "llama.cpp runs the file (`headstart launch FILE.gguf --engine llamacpp`)."
            )


def shortest(value: float) -> float:
    """A number that was stored in 32 bits as it was written: 1e-06, not 9.99999997e-07."""
    for digits in range(6, 10):
        found = float(f"{value:.{digits}g}")
        if struct.pack("<f", found) == struct.pack("<f", value):
            return found
    return value


def common(keys: Keys) -> Config:
    """What every architecture has."""
    heads, hidden = keys.each("attention.head_count")[0], keys.number("embedding_length")
    if type(heads) is not int or heads < 1:
        raise BadConfig(
            f"{keys.model.folder}: {keys.model.arch_name}.attention.head_count is "
            f"{str(heads)[:40]}; expected a whole number above 0. Convert the model again."
        )
    embed = keys.model.tensors.get("token_embd.weight")
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": keys.num_layers,
        "vocab_size": embed.shape[0] if embed is not None and len(embed.shape) == 2 else 0,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.each("attention.head_count_kv", heads)[0],
        "head_dim": keys.number("attention.key_length", hidden // heads),
        "intermediate_size": keys.each("feed_forward_length")[0],
        "max_position_embeddings": keys.number("context_length", 2048),
        "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in keys.model.tensors,
        "hidden_act": "silu",
    }
    width = keys.number("attention.value_length", config["head_dim"])
    if width != config["head_dim"]:
        config["v_head_dim"] = width
    return config | _rope(keys)


def _rope(keys: Keys) -> Config:
    kind, theta = keys.get("rope.scaling.type"), keys.get("rope.freq_base")
    rope: Config = {"rope_type": kind or "default", "rope_theta": theta or 10000.0}
    if kind in (None, "none"):
        rope["rope_type"] = "default"
    elif kind not in ("linear", "yarn"):
        raise UnsupportedFamily(
            f"{keys.model.folder}: rope.scaling.type is {str(kind)[:40]!r}; expected none, linear "
            "or yarn. llama.cpp runs the file."
        )
    names = {
        "factor": "factor", "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
        "yarn_attn_factor": "attention_factor",
    }  # fmt: skip
    for theirs, ours in names.items():
        value = keys.get(f"rope.scaling.{theirs}")
        if value is not None and rope["rope_type"] != "default":
            rope[ours] = value
    share = keys.get("rope.scaling.yarn_log_multiplier")
    if share is not None:  # for DeepSeek's files a tenth of mscale_all_dim, which mscale equals
        rope["mscale"] = rope["mscale_all_dim"] = shortest(share * 10)
    if "rope_freqs.weight" in keys.model.tensors:
        rope |= _llama3(keys, rope)
    return {"rope_theta": rope["rope_theta"], "rope_parameters": rope}


def _llama3(keys: Keys, rope: Config) -> Config:
    """Llama 3's scaling, which is stored as one factor for each frequency."""
    import numpy as np

    found = floats_of(stored(keys.model.tensors["rope_freqs.weight"])).reshape(-1)
    dim = keys.number("rope.dimension_count", 2 * len(found))
    scaling = {**_LLAMA3, "factor": shortest(float(found.max()))}
    plain = 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    turns = scaling["original_max_position_embeddings"] * plain / (2 * np.pi)
    share = ((turns - 1.0) / 3.0).clip(0, 1)
    made = 1 / ((1 - share) / scaling["factor"] + share)
    if made.shape != found.shape or not np.allclose(made, found, rtol=1e-5):
        raise UnsupportedFamily(
            f"{keys.model.folder}: rope_freqs.weight scales frequencies in another way than Llama "
            "3 (factors 1 and 4 over 8192 positions), which is not computed here. llama.cpp runs "
            "the file."
        )
    return scaling


def _partial(keys: Keys, config: Config) -> Config:
    """How much of a head is rotated."""
    rotated = keys.number("rope.dimension_count", config["head_dim"])
    share = rotated / config["head_dim"]
    rope = {**config["rope_parameters"], "partial_rotary_factor": share}
    return {"partial_rotary_factor": share, "rope_parameters": rope}


def _whole(keys: Keys, config: Config) -> Config:
    """Nothing, where all of a head is rotated as the engine has it."""
    rotated = keys.number("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise UnsupportedFamily(
            f"{keys.model.folder} rotates {rotated} of {config['head_dim']} values of a head; "
            f"expected all for {keys.model.arch_name}. llama.cpp runs the file."
        )
    return {}


def llama_config(keys: Keys) -> Config:
    config = common(keys)
    if keys.get("expert_count"):
        raise UnsupportedFamily(
            f"{keys.model.folder} is a llama model with experts (Mixtral), which the engine does "
            "not run. llama.cpp does."
        )
    keys.get("expert_used_count")
    return config | _whole(keys, config) | {
        "attention_bias": keys.any_has("attn_q.bias"),
        "mlp_bias": keys.any_has("ffn_gate.bias"),
    }  # fmt: skip


def qwen_config(keys: Keys) -> Config:
    config = common(keys)
    return config | _whole(keys, config)


def hybrid_config(keys: Keys) -> Config:
    """Qwen3-Next and Qwen3.5: some layers keep a state."""
    config = common(keys)
    heads = keys.number("ssm.time_step_rank")
    often = keys.number("full_attention_interval", 4)
    kinds = keys.each("attention.recurrent_layers")
    if kinds[0] is None:
        kinds = [bool((layer + 1) % often) for layer in range(keys.num_layers)]
    keys.get("rope.dimension_sections")  # of images' positions; a text's three are the same
    return config | _partial(keys, config) | _experts(keys) | {
        "layer_types": [
            "linear_attention" if kind else "full_attention" for kind in kinds[: keys.num_layers]
        ],
        "full_attention_interval": often,
        "linear_num_key_heads": keys.number("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.number("ssm.state_size"),
        "linear_value_head_dim": keys.number("ssm.inner_size") // max(heads, 1),
        "linear_conv_kernel_dim": keys.number("ssm.conv_kernel"),
        "mlp_only_layers": keys.layers_with("ffn_gate.weight"),
        "attn_output_gate": True,
    }  # fmt: skip


def _experts(keys: Keys) -> Config:
    """Sizes and routing of experts, where there are any."""
    count = keys.get("expert_count")
    kind = keys.get("expert_gating_func")
    found: Config = {
        "num_experts_per_tok": keys.get("expert_used_count"),
        "moe_intermediate_size": keys.get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.get("expert_shared_feed_forward_length"),
        "n_shared_experts": keys.get("expert_shared_count"),
        "n_group": keys.get("expert_group_count"),
        "topk_group": keys.get("expert_group_used_count"),
        "routed_scaling_factor": keys.get("expert_weights_scale"),
    }
    norm = keys.get("expert_weights_norm")
    if not count:
        return {}
    if kind is not None and kind not in _GATING:
        raise UnsupportedFamily(
            f"{keys.model.folder}: expert_gating_func is {str(kind)[:20]}; expected "
            f"{' or '.join(_GATING.values())}. llama.cpp runs the file."
        )
    found |= {
        "num_experts": count, "n_routed_experts": count,
        "scoring_func": _GATING.get(kind) if kind is not None else None,
        "norm_topk_prob": norm,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def glm_config(keys: Keys) -> Config:
    config = common(keys)
    return config | _partial(keys, config) | _experts(keys) | {
        "norm_topk_prob": bool(keys.get("expert_weights_norm")),
        "first_k_dense_replace": keys.number("leading_dense_block_count", 0),
        "attention_bias": keys.any_has("attn_q.bias"),
        "use_qk_norm": keys.any_has("attn_q_norm.weight"),
    }  # fmt: skip


def latent_config(keys: Keys) -> Config:
    """Latent attention, which is stored as one shared key head of the latent's width."""
    config = common(keys)
    rotated = keys.number("rope.dimension_count")
    width = keys.number("attention.key_length_mla")
    config |= _experts(keys) | {
        "num_key_value_heads": config["num_attention_heads"],
        "norm_topk_prob": bool(keys.get("expert_weights_norm")),
        "first_k_dense_replace": keys.number("leading_dense_block_count", 0),
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "kv_lora_rank": keys.number("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": keys.number("attention.value_length_mla"),
        "head_dim": width,
    }
    if config.get("scoring_func") != "sigmoid":
        raise UnsupportedFamily(
            f"{keys.model.folder} is a deepseek2 model whose experts are not chosen by sigmoids "
            "(DeepSeek-V2 and its kind), which the engine does not run. llama.cpp does."
        )
    return config


def sparse_config(keys: Keys) -> Config:
    """The same with indexers, which say what a layer attends to."""
    kinds = keys.get("attention.indexer.types")
    names = {True: "full", False: "shared"}
    own = keys.layers_with("indexer.attn_k.weight")
    kinds = kinds or [layer in own for layer in range(keys.num_layers)]
    return latent_config(keys) | {
        "index_n_heads": keys.number("attention.indexer.head_count"),
        "index_head_dim": keys.number("attention.indexer.key_length"),
        "index_topk": keys.number("attention.indexer.top_k"),
        "indexer_types": [names[bool(kind)] for kind in kinds[: keys.num_layers]],
    }


def ernie_config(keys: Keys) -> Config:
    config = common(keys)
    experts = _experts(keys)
    last = max(keys.layers_with("ffn_gate_exps.weight"), default=-1)
    return config | _whole(keys, config) | {
        "moe_num_experts": experts.get("num_experts"),
        "moe_k": experts.get("num_experts_per_tok"),
        "moe_intermediate_size": experts.get("moe_intermediate_size"),
        "moe_num_shared_experts": experts.get("n_shared_experts", 0),
        "moe_layer_start_index": keys.number("leading_dense_block_count", 0),
        "moe_layer_end_index": last,
        "moe_layer_interval": keys.number("interleave_moe_layer_step", 1),
        "use_bias": False,
    }  # fmt: skip


def step_config(keys: Keys) -> Config:
    """Layers that slide have their own number of heads and rotate all of them."""
    config = common(keys)
    if config["rope_parameters"]["rope_type"] != "default":
        raise UnsupportedFamily(
            f"{keys.model.folder}: rotation of {keys.model.arch_name} is scaled, which is not read "
            "from GGUF here. llama.cpp runs the file."
        )
    slides = keys.each("attention.sliding_window_pattern")
    heads, groups = keys.each("attention.head_count"), keys.each("attention.head_count_kv")
    usual, other = _first(slides, False), _first(slides, True)
    theta = config.pop("rope_theta")
    inner = keys.get("rope.freq_base_swa") or theta
    experts = _experts(keys)
    keys.number("moe_every_n_layers", 1)
    keys.number("leading_dense_block_count", 0)
    config.pop("rope_parameters")
    limits = {
        "swiglu_limits": keys.get("swiglu_clamp_exp"),
        "swiglu_limits_shared": keys.get("swiglu_clamp_shexp"),
    }
    return config | {name: value for name, value in limits.items() if value} | {
        "num_attention_heads": heads[usual],
        "num_attention_groups": groups[usual],
        "num_key_value_heads": groups[usual],
        "attention_other_setting": {
            "attention_type": "sliding_attention", "num_attention_heads": heads[other],
            "num_attention_groups": groups[other], "head_dim": config["head_dim"],
        },
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "rope_theta": [inner if each else theta for each in slides],
        "partial_rotary_factors": [1.0 if each else 0.5 for each in slides],
        "sliding_window": keys.number("attention.sliding_window"),
        "use_head_wise_attn_gate": keys.any_has("attn_gate.weight"),
        "moe_num_experts": experts.get("num_experts"),
        "moe_top_k": experts.get("num_experts_per_tok"),
        "moe_intermediate_size": experts.get("moe_intermediate_size"),
        "share_expert_dim": experts.get("shared_expert_intermediate_size"),
        "moe_router_scaling_factor": experts.get("routed_scaling_factor", 1.0),
        "norm_expert_weight": experts.get("norm_topk_prob", True),
        "moe_layers_enum": ",".join(map(str, keys.layers_with("ffn_gate_exps.weight"))),
    }  # fmt: skip


def _first(values: list[Any], wanted: bool) -> int:
    """The first place of a layer of that kind; of any, where there is none."""
    return next((place for place, value in enumerate(values) if bool(value) == wanted), 0)


def mimo_config(keys: Keys) -> Config:
    """MiMo-V2-Flash: layers that slide have their own K/V heads and rotation."""
    config = common(keys)
    pattern = [int(bool(each)) for each in keys.each("attention.sliding_window_pattern")]
    groups = keys.each("attention.head_count_kv")
    usual, other = _first(pattern, False), _first(pattern, True)
    width = config.get("v_head_dim", config["head_dim"])
    moe = keys.layers_with("ffn_gate_exps.weight")
    return config | _partial(keys, config) | _experts(keys) | {
        "layernorm_epsilon": config["rms_norm_eps"],
        "num_key_value_heads": groups[usual],
        "v_head_dim": width,
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_num_key_value_heads": groups[other],
        "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": width,
        "swa_rope_theta": keys.get("rope.freq_base_swa") or config["rope_theta"],
        "sliding_window_size": keys.number("attention.sliding_window"),
        "sliding_window": keys.number("attention.sliding_window"),
        "attention_value_scale": keys.get("attention.value_scale"),
        "add_swa_attention_sink_bias": keys.any_has("attn_sinks.weight"),
        "hybrid_layer_pattern": pattern[: keys.num_layers],
        "moe_layer_freq": [int(layer in moe) for layer in range(keys.num_layers)],
        "n_shared_experts": 0,
    }  # fmt: skip


ConfigOf = Callable[[Keys], Config]
