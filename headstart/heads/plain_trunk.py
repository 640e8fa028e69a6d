"""Trunks without a published head, described as a family whose head layout engines serve.

The values stay; the config says what the family's config class would assume otherwise, and
attention biases that the trunk does not have are to be added as zeros.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from headstart.checkpoint.config import Config
from headstart.checkpoint.quantized.names import is_quantized, is_scale, packed_names
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import BadConfig, UnexpectedTensor, UnsupportedFamily, some
from headstart.families.base import Family, expand
from headstart.families.registry import PLAIN_TRUNKS

_REQUIRED = (
    "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size",
)  # fmt: skip
_OPTIONAL = ("head_dim", "num_key_value_heads")


def described_as(model: Checkpoint, layout: Family) -> Config:
    """The config of `model` with every size that the family `layout` needs."""
    raw = copy.deepcopy(model.config.raw)
    _check_sizes(model, raw)
    runtime = PLAIN_TRUNKS[model.config.model_type].runtime
    runtime.complete(raw)  # refuses what the layout cannot say
    if raw.get("mlp_bias") or (runtime.output_bias and raw.get("attention_bias")):
        raise UnsupportedFamily(
            f"{model.folder} has biases (mlp_bias or attention_bias) that the {layout.name} layout "
            "has no place for. Train a separate drafter for it instead."
        )
    raw.update(unspoken(raw, model.config.model_type))
    raw.update(
        model_type=layout.model_types[0],
        architectures=list(layout.architectures[:1]),
        attention_bias=True,
        auto_map=dict(layout.auto_map),
    )
    return Config(raw)


def unspoken(fields: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """What a config of a plain trunk means where it is silent.

    The config class of the layout that it is grafted as would put other defaults in its place.
    """
    heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
    defaults = {"num_key_value_heads": heads, **PLAIN_TRUNKS[model_type].runtime.defaults}
    if isinstance(heads, int) and isinstance(hidden, int) and heads:
        defaults["head_dim"] = hidden // heads
    return {name: value for name, value in defaults.items() if fields.get(name) is None}


def _check_sizes(model: Checkpoint, raw: dict[str, Any]) -> None:
    for field in (*_REQUIRED, *_OPTIONAL):
        value = raw.get(field)
        if value is None and field in _OPTIONAL:
            continue
        if type(value) is not int or value < 1:
            found = f"{field} {value!r}" if field in raw else f"no {field}"
            raise BadConfig(
                f"{model.folder / 'config.json'} has {found}; expected a positive integer. Take "
                "the config.json of the original release."
            )


def missing_biases(model: Checkpoint, layout: Family) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the q, k and v biases that the trunk lacks.

    `model` has a config from `described_as`. What else does not fit the layout is an error.
    """
    expected = dict(_trunk(model, layout))
    missing = [
        (name, shape)
        for name, shape in expected.items()
        if shape is not None and not any(n in model.tensors for n in packed_names(name))
    ]
    known = {*expected, *layout.trunk.lm_heads}
    known |= {packed for name in known for packed in packed_names(name)}
    unexpected = [
        name
        for name in model.tensors
        if name not in known and not is_scale(name) and not name.endswith(".rotary_emb.inv_freq")
    ]
    if unexpected:
        raise UnexpectedTensor(
            f"{model.folder} holds {some(unexpected)}, for which the {layout.name} layout has no "
            "place. Train a separate drafter for it instead."
        )
    return missing


def _trunk(model: Checkpoint, layout: Family) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    """The tensors that the config asks for, each held against what is stored."""
    fields = model.config.fields
    trunk = layout.trunk
    prefix = trunk.prefixes[0]
    hidden, vocab = fields["hidden_size"], fields["vocab_size"]
    stored = model.tensors.get(prefix + trunk.embed)
    padded = max(vocab, stored.shape[0]) if stored is not None and stored.shape else vocab
    outside: dict[str, tuple[int, ...]] = {
        trunk.embed: (padded, hidden),
        trunk.final_norm: (hidden,),
    }
    for name, shape in outside.items():
        yield _checked(model, prefix + name, shape)
    layer_parts = expand(trunk.kinds["dense"], fields)
    for layer in range(fields["num_hidden_layers"]):
        for name, part in layer_parts.items():
            yield _checked(model, prefix + trunk.layer.format(layer=layer) + name, part)


def _checked(
    model: Checkpoint, name: str, shape: tuple[int, ...] | None
) -> tuple[str, tuple[int, ...] | None]:
    info = next((model.tensors[n] for n in packed_names(name) if n in model.tensors), None)
    is_wrong = info is not None and not is_quantized(info.name, info) and info.shape != shape
    if is_wrong or (info is None and not name.endswith(".bias")):
        found = "no such tensor" if info is None else f"shape {info.shape}"
        raise BadConfig(
            f"the config of {model.folder} asks for {name} {shape}; the checkpoint has {found}. "
            "Take config.json and weights from one release."
        )
    return name, shape
