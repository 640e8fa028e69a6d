"""Shapes of well-known models, by name: sizes are published facts, weights are made."""

from __future__ import annotations

from typing import Any

from headstart.errors import ConfigError

_BASE: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,  # agreement needs an LM head of its own
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def _mimo(**sizes: Any) -> dict[str, Any]:
    from headstart.families.remote_code import MIMO_AUTO_MAP

    return {
        **_BASE,
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        "auto_map": dict(MIMO_AUTO_MAP),
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
        **sizes,
    }


def _qwen3(**sizes: Any) -> dict[str, Any]:
    return {
        **_BASE,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "mtp_num_hidden_layers": 1,
        **sizes,
    }


def _glm4_moe(**sizes: Any) -> dict[str, Any]:
    return {
        **_BASE,
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        **sizes,
    }


def _ernie4_5_moe(**sizes: Any) -> dict[str, Any]:
    return {
        **_BASE,
        "model_type": "ernie4_5_moe",
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "use_bias": False,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "num_nextn_predict_layers": 1,
        **sizes,
    }


def _qwen_hybrid(model_type: str, architecture: str, **sizes: Any) -> dict[str, Any]:
    """Three layers of four are recurrent, by `full_attention_interval`."""
    return {
        **_BASE,
        "rms_norm_eps": 1e-6,
        "model_type": model_type,
        "architectures": [architecture],
        "attention_bias": False,
        "attn_output_gate": True,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        **sizes,
    }


def _qwen3_5(model_type: str, architecture: str, **sizes: Any) -> dict[str, Any]:
    config = _qwen_hybrid(model_type, architecture, **sizes)
    config["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": config.pop("rope_theta"),
        "partial_rotary_factor": config.pop("partial_rotary_factor"),
    }
    return {**config, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}


def _qwen_experts(count: int, chosen: int) -> dict[str, Any]:
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _sizes(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, theta: float
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "rope_theta": theta,
    }


# Llama trunks are made in the mimo layout, which is what they become when a head is grafted.
SHAPES: dict[str, dict[str, Any]] = {
    "mimo-7b": _mimo(**_sizes(36, 4096, 11008, 32, 8, 151680, 640000.0)),
    "llama-8b": _mimo(**_sizes(32, 4096, 14336, 32, 8, 128256, 500000.0)),
    "llama-1b": _mimo(**_sizes(16, 2048, 8192, 32, 8, 128256, 500000.0)),
    "smollm2-135m": _mimo(**_sizes(30, 576, 1536, 9, 3, 49152, 100000.0)),
    "smollm2-1.7b": _mimo(**_sizes(24, 2048, 8192, 32, 32, 49152, 130000.0)),
    "qwen2-7b": _mimo(**_sizes(28, 3584, 18944, 28, 4, 152064, 1000000.0)),
    "qwen3-8b": _qwen3(**_sizes(36, 4096, 12288, 32, 8, 151936, 1000000.0)),
    "qwen3-0.6b": _qwen3(**{**_sizes(28, 1024, 3072, 16, 8, 151936, 1000000.0), "head_dim": 128}),
    "glm-4.5-air": _glm4_moe(
        **{**_sizes(46, 4096, 10944, 96, 8, 151552, 1000000.0), "head_dim": 128},
        n_routed_experts=128, num_experts_per_tok=8, n_shared_experts=1,
        moe_intermediate_size=1408, first_k_dense_replace=1, routed_scaling_factor=1.0,
        use_qk_norm=False,
    ),
    "ernie-4.5-21b": _ernie4_5_moe(
        **_sizes(28, 2560, 12288, 20, 4, 103424, 500000.0),
        moe_num_experts=64, moe_k=6, moe_num_shared_experts=2, moe_intermediate_size=1536,
    ),
    "qwen3-next-80b": _qwen_hybrid(
        "qwen3_next", "Qwen3NextForCausalLM", linear_num_value_heads=32, **_qwen_experts(512, 10),
        **{**_sizes(48, 2048, 5120, 16, 2, 151936, 1e7), "head_dim": 256},
    ),
    "qwen3.5-27b": _qwen3_5(
        "qwen3_5_text", "Qwen3_5ForCausalLM", linear_num_value_heads=48,
        **{**_sizes(64, 5120, 17408, 24, 4, 248320, 1e7), "head_dim": 256},
    ),
    "qwen3.5-35b": _qwen3_5(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", linear_num_value_heads=32,
        **_qwen_experts(256, 8),
        # no layer is dense: its width stands for nothing
        **{**_sizes(40, 2048, 512, 16, 2, 248320, 1e7), "head_dim": 256},
    ),
}  # fmt: skip

# short names for numbers: --shape layers=8,hidden=2048,...
_NUMBERS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
}


# Two tokens end a text, and a cycle of fewer than eight others cannot hold every rate.
_LEAST_VOCAB = 10


def _check(numbers: dict[str, int]) -> None:
    """ConfigError for numbers that make no model which engines could run."""
    hidden, heads, kv_heads = numbers["hidden"], numbers["heads"], numbers["kv_heads"]
    if hidden % 2:
        raise ConfigError(f"--shape: hidden is {hidden}; expected an even number.")
    if heads % kv_heads:
        raise ConfigError(
            f"--shape: heads is {heads} and kv_heads {kv_heads}; expected a multiple. Each K/V "
            "head serves the same number of heads."
        )
    if "head_dim" not in numbers and hidden % heads:
        raise ConfigError(
            f"--shape: hidden is {hidden} and heads {heads}; expected a multiple. Change one, or "
            "give head_dim."
        )
    head_dim = numbers.get("head_dim", hidden // heads)
    if head_dim % 2:
        raise ConfigError(
            f"--shape: head_dim is {head_dim}; expected an even number, because rotary positions "
            "turn pairs. Give another head_dim, or change hidden or heads."
        )
    if numbers["vocab"] < _LEAST_VOCAB:
        raise ConfigError(
            f"--shape: vocab is {numbers['vocab']}; expected {_LEAST_VOCAB} or more: eight tokens "
            "in use and two that end a text."
        )


def shape_config(shape: str) -> dict[str, Any]:
    """The config of a named shape, or of one given by numbers (`layers=8,hidden=2048,...`)."""
    named, _, changes = shape.partition(",")
    if named in SHAPES:
        return _changed(SHAPES[named], changes)
    if "=" not in named:
        raise ConfigError(
            f"no shape is called {shape!r}; expected one of {', '.join(SHAPES)}, or numbers as in "
            "layers=8,hidden=2048,intermediate=8192,heads=32,kv_heads=8,vocab=32000. A name may be "
            "followed by numbers: mimo-7b,layers=8."
        )
    numbers = _numbers(shape)
    missing = [name for name in _NUMBERS if name not in numbers and name != "head_dim"]
    if missing:
        raise ConfigError(f"--shape lacks {', '.join(missing)}.")
    _check(numbers)
    numbers.setdefault("head_dim", numbers["hidden"] // numbers["heads"])
    return _mimo(rope_theta=10000.0, **{_NUMBERS[name]: n for name, n in numbers.items()})


def _numbers(text: str) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in _NUMBERS or not value.isdigit() or int(value) < 1:
            raise ConfigError(
                f"--shape: {part!r} is not one of {', '.join(_NUMBERS)} with a number."
            )
        numbers[name] = int(value)
    return numbers


def _changed(config: dict[str, Any], changes: str) -> dict[str, Any]:
    """A named shape with some of its numbers changed, such as fewer layers to fit a device."""
    numbers = _numbers(changes) if changes else {}
    result = {**config, **{_NUMBERS[name]: number for name, number in numbers.items()}}
    _check({name: result[field] for name, field in _NUMBERS.items()})
    return result
