"""The config of a shape as a user names it: a model, numbers, or a model with other numbers."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from headstart.calibrate.shapes import SHAPES, mimo
from headstart.calibrate.shapes_whole import WHOLE_CONFIGS
from headstart.errors import ConfigError

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
# of a named shape that has them, too
_EXPERTS = ("n_routed_experts", "num_experts", "moe_num_experts")


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


def released(config: dict[str, Any]) -> dict[str, Any]:
    """The config as such a model is released: inside of another one, where engines look for that.

    There are no tensors of a vision part; engines are told that texts are all they get.
    """
    whole = WHOLE_CONFIGS.get(config["model_type"])
    if whole is None:
        return config
    outer = ("tie_word_embeddings", "torch_dtype")
    inner = {name: value for name, value in config.items() if name != "architectures"}
    vision = {**whole["vision_config"], "out_hidden_size": config["hidden_size"]}
    shared = {name: config[name] for name in outer if name in config}
    return {**whole, **shared, "text_config": inner, "vision_config": vision}


def shape_config(shape: str) -> dict[str, Any]:
    """The config of a named shape, or of one given by numbers (`layers=8,hidden=2048,...`)."""
    named, _, changes = shape.partition(",")
    if named in SHAPES:
        return _changed(SHAPES[named], changes)
    if "=" not in named:
        near = get_close_matches(named, SHAPES, 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(
            f"no shape is called {shape!r}{meant}; expected one of {', '.join(SHAPES)}, or numbers "
            "as in layers=8,hidden=2048,intermediate=8192,heads=32,kv_heads=8,vocab=32000. A name "
            "may be followed by numbers: mimo-7b,layers=8."
        )
    numbers = _numbers(shape)
    missing = [name for name in _NUMBERS if name not in numbers and name != "head_dim"]
    if missing:
        raise ConfigError(f"--shape lacks {', '.join(missing)}.")
    _check(numbers)
    numbers.setdefault("head_dim", numbers["hidden"] // numbers["heads"])
    return mimo(rope_theta=10000.0, **{_NUMBERS[name]: n for name, n in numbers.items()})


def _numbers(text: str, known: Iterable[str] = _NUMBERS) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in known or not value.isdigit() or int(value) < 1:
            raise ConfigError(f"--shape: {part!r} is not one of {', '.join(known)} with a number.")
        numbers[name] = int(value)
    return numbers


def _changed(config: dict[str, Any], changes: str) -> dict[str, Any]:
    """A named shape with some of its numbers changed, such as fewer layers to fit a device."""
    fields = {name: field for name, field in _NUMBERS.items() if field in config}
    fields.update(("experts", field) for field in _EXPERTS if field in config)
    numbers = _numbers(changes, fields) if changes else {}
    if "kv_lora_rank" in config and "heads" in numbers:  # every head has its own, unfolded
        numbers.setdefault("kv_heads", numbers["heads"])
    result = {**config, **{fields[name]: number for name, number in numbers.items()}}
    before, after = config["num_hidden_layers"], result["num_hidden_layers"]
    for name, value in config.items():
        if isinstance(value, list) and len(value) >= before > after:  # modules' come last
            result[name] = value[:after] + value[before:]
    checked = {name: result[field] for name, field in fields.items()}
    _check({"head_dim": result.get("qk_rope_head_dim", 0), **checked})
    return result
