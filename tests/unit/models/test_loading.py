"""Loading is strict: nothing missing, nothing left over, no wrong shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.model_reference import SMALL, published, randomised, sources, transformers_model
from support.quantized_tensors import source
from torch import Tensor

from headstart.errors import MissingTensor, ShapeMismatch, UnexpectedTensor, UnsupportedFamily
from headstart.families.base import HeadLayout
from headstart.models.config_reader import model_config
from headstart.models.loading import load_head, load_trunk
from headstart.models.mtp import MTPHead
from headstart.models.trunk import Trunk

RAW: dict[str, Any] = {**SMALL, "model_type": "qwen2"}
CONFIG = model_config(RAW)


def trunk_tensors() -> dict[str, Tensor]:
    return published(transformers_model(RAW), CONFIG)


def empty_trunk() -> Trunk:
    return Trunk(CONFIG, 8, torch.float32)


def head_tensors(head: MTPHead) -> dict[str, Tensor]:
    """A head's parameters under the names that files have, q, k, v and gate, up apart."""
    result = {}
    heads, kv = CONFIG.num_heads * CONFIG.head_dim, CONFIG.num_kv_heads * CONFIG.head_dim
    block = {
        "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
        "attention.o": "self_attn.o_proj", "mlp.down": "mlp.down_proj",
    }  # fmt: skip
    for ours, value in head.state_dict().items():
        name = ours.replace("modules_.", "modules.")
        for old, new in block.items():
            name = name.replace(f"block.{old}.", f"block.{new}.")
        if "attention.qkv" in name:
            for letter, part in zip("qkv", value.split([heads, kv, kv]), strict=True):
                result[name.replace("attention.qkv", f"self_attn.{letter}_proj")] = part
        elif "gate_up" in name:
            for which, part in zip(("gate", "up"), value.chunk(2), strict=True):
                result[name.replace("gate_up", f"{which}_proj")] = part
        else:
            result[name] = value
    return result


def test_every_parameter_is_filled_from_its_part() -> None:
    tensors = trunk_tensors()
    trunk = empty_trunk()
    load_trunk(trunk, sources(tensors))
    qkv = [tensors[f"model.layers.1.self_attn.{p}_proj.bias"] for p in "qkv"]
    assert torch.equal(trunk.state_dict()["layers.1.attention.qkv.bias"], torch.cat(qkv))


def test_a_missing_tensor_is_named() -> None:
    tensors = trunk_tensors()
    del tensors["model.layers.2.self_attn.k_proj.bias"]
    with pytest.raises(MissingTensor, match=r"1 tensors are missing: model\.layers\.2\.self_attn"):
        load_trunk(empty_trunk(), sources(tensors))


def test_a_tensor_without_a_place_is_named() -> None:
    tensors = {**trunk_tensors(), "model.layers.0.self_attn.sinks": torch.zeros(4)}
    with pytest.raises(UnexpectedTensor, match=r"model\.layers\.0\.self_attn\.sinks"):
        load_trunk(empty_trunk(), sources(tensors))


def test_a_wrong_shape_is_named_with_both_shapes() -> None:
    tensors = trunk_tensors()
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(32, 31)
    with pytest.raises(ShapeMismatch, match=r"q_proj\.weight has shape \(32, 31\).*\(32, 32\)"):
        load_trunk(empty_trunk(), sources(tensors))


def test_rotary_frequencies_that_exporters_store_are_passed_over() -> None:
    tensors = {**trunk_tensors(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    trunk = empty_trunk()
    load_trunk(trunk, sources(tensors))
    assert torch.equal(trunk.embed, tensors["model.embed_tokens.weight"])


def test_a_tied_model_may_store_its_lm_head_again() -> None:
    raw = {**RAW, "tie_word_embeddings": True}
    config = model_config(raw)
    tensors = published(transformers_model(raw), config)
    trunk = Trunk(config, 8, torch.float32)
    load_trunk(trunk, sources({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}))
    assert trunk.lm_head.weight is trunk.embed


def test_a_head_survives_the_way_through_its_published_names() -> None:
    head = MTPHead(CONFIG, HeadLayout(), 2)
    randomised(head)
    copies = {f"modules.{m}.lm_head.weight": torch.zeros(61, 32) for m in range(2)}
    again = MTPHead(CONFIG, HeadLayout(), 2)
    load_head(again, sources({**head_tensors(head), **copies}), CONFIG)
    for name, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda t: t.pop("modules.1.fuse.weight"), MissingTensor, "modules.1.fuse.weight"),
        (lambda t: t.update({"modules.0.gate.weight": torch.zeros(1)}), UnexpectedTensor, "gate"),
        (lambda t: t.update({"modules.0.fuse.weight": torch.zeros(32, 32)}), ShapeMismatch, "64"),
    ],
    ids=["missing", "left over", "wrong shape"],
)
def test_a_head_that_does_not_fit_is_refused_by_name(
    change: Any, error: type[Exception], words: str
) -> None:
    head = MTPHead(CONFIG, HeadLayout(), 2)
    tensors = head_tensors(randomised(head))
    change(tensors)
    with pytest.raises(error, match=words):
        load_head(MTPHead(CONFIG, HeadLayout(), 2), sources(tensors), CONFIG)


def test_integers_are_no_weight() -> None:
    codes = source(torch.ones(32, 32, dtype=torch.int32))
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(UnsupportedFamily, match=rf"{name} is stored as I32; expected BF16"):
        load_trunk(empty_trunk(), {**sources(trunk_tensors()), name: codes})
    head = MTPHead(CONFIG, HeadLayout(), 1)
    name = "modules.0.block.self_attn.q_proj.weight"
    with pytest.raises(UnsupportedFamily, match=rf"{name} is stored as I32; expected BF16"):
        load_head(head, {**sources(head_tensors(head)), name: codes}, CONFIG)
