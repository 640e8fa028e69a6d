"""Quantised trunks load dequantised or are refused by name; heads must fit their trunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_runs import (
    assert_head_is_alive,
    checkpoint,
    greedy,
    ids_of,
    make_prompts,
    run,
    start,
)
from support.head_edits import Tensors, edited, with_dense_head
from support.tiny_fixture import Tiny

from headstart.engine.engine import Engine
from headstart.errors import ConfigError, MissingTensor, UnexpectedTensor, UnsupportedFamily


def is_linear(name: str) -> bool:
    is_kept = "eh_proj" in name  # a fusion matrix stays as it is
    return (
        "model.layers." in name and name.endswith(("_proj.weight", "_mqa.weight")) and not is_kept
    )


def block_fp8(own: Tensors) -> None:
    for name in [n for n in own if is_linear(n)]:
        rows, columns = (-(-size // 128) for size in own[name].shape)
        scale = 0.01 + 0.01 * torch.rand(rows, columns, generator=torch.Generator().manual_seed(1))
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        wide = wide[: own[name].shape[0], : own[name].shape[1]]
        own[name] = (own[name] / wide).to(torch.float8_e4m3fn)
        own[name.replace("weight", "weight_scale_inv")] = scale


def row_int8(own: Tensors) -> None:
    for name in [n for n in own if is_linear(n)]:
        scale = own[name].abs().amax(1, keepdim=True) / 127
        own[name.replace("weight", "weight_scale")] = scale
        own[name] = (own[name] / scale).round().to(torch.int8)


def tensor_fp8(own: Tensors) -> None:
    for name in [n for n in own if is_linear(n)]:
        scale = own[name].abs().amax() / 448
        own[name.replace("weight", "weight_scale")] = scale.reshape(1)
        own[name] = (own[name] / scale).to(torch.float8_e4m3fn)


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FORMATS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "block FP8": ("mimo", block_fp8, BLOCKS),
    "block FP8 of DeepSeek-V3": ("deepseek_v3", block_fp8, BLOCKS),
    "compressed-tensors int8": ("mimo", row_int8, {"quant_method": "compressed-tensors"}),
    "compressed-tensors fp8": ("mimo", tensor_fp8, {"quant_method": "compressed-tensors"}),
}


@pytest.mark.parametrize(("family", "change", "method"), FORMATS.values(), ids=FORMATS)
def test_an_eight_bit_trunk_runs_dequantised(
    family: str, change: Any, method: dict[str, Any], tiny: Tiny, tmp_path: Path
) -> None:
    plain = checkpoint(tiny, family, moe_intermediate_size=144)
    stored: Tensors = {}

    def quantise(own: Tensors) -> None:
        change(own)
        stored.update(own)

    folder = edited(
        plain, tmp_path / "q", change=quantise,
        change_config=lambda c: c.update(quantization_config=method),
    )  # fmt: skip
    engine, reference = start(folder, speculate=3), start(plain, speculate=0)
    loaded, wanted = (e.model.trunk.state_dict() for e in (engine, reference))
    for name in ("layers.0.attention.o.weight", "layers.0.mlp.down.weight"):
        difference = (loaded[name] - wanted[name]).abs().max()
        assert 0 < difference < 0.1 * wanted[name].abs().max()
    results = run(engine, make_prompts(), greedy())
    assert_head_is_alive(results)
    assert ids_of(results) == ids_of(run(start(folder, speculate=0), make_prompts(), greedy()))


def test_a_dense_block_of_a_deepseek_head_runs(tiny: Tiny, tmp_path: Path) -> None:
    """As JoyAI-LLM-Flash has it; what is stored tells."""
    folder = with_dense_head(checkpoint(tiny, "deepseek_v3", num_hidden_layers=3), tmp_path / "d")
    engine = start(folder, speculate=3)
    assert engine.model.head is not None and engine.model.head.config.head_layer.feed == "dense"
    results = run(engine, make_prompts(), greedy())
    assert_head_is_alive(results)
    assert ids_of(results) == ids_of(run(start(folder, speculate=0), make_prompts(), greedy()))


def test_the_text_part_of_step_3_7_runs_without_its_vision_part(tiny: Tiny, tmp_path: Path) -> None:
    plain = checkpoint(tiny, "step3p5")

    def nest(config: dict[str, Any]) -> None:
        text = dict(config)
        config.clear()
        config |= {
            "model_type": "step3p7", "architectures": ["Step3p7ForConditionalGeneration"],
            "text_config": text, "vision_config": {"width": 8},
        }  # fmt: skip

    def look(own: Tensors) -> None:
        own["vision_model.conv1.weight"] = torch.zeros(8, 3)

    folder = edited(plain, tmp_path / "seeing", change=look, change_config=nest)
    engine = start(folder, speculate=3)
    assert "text only: 1 tensors of the vision part are not loaded" in engine.notes
    own, other = (run(e, make_prompts(), greedy()) for e in (engine, start(plain, speculate=3)))
    assert_head_is_alive(own)
    assert ids_of(own) == ids_of(other)


def packed(own: Tensors) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    own[f"{name}_packed"] = torch.zeros(64, 16, dtype=torch.int32)
    own[f"{name}_scale"] = torch.ones(64, 1)
    del own[name]


def grouped_int8(own: Tensors) -> None:
    for name in [n for n in own if is_linear(n)]:
        rows, columns = own[name].shape
        own[name.replace("weight", "weight_scale")] = torch.full((rows, columns // 16), 0.01)
        own[name] = torch.ones(rows, columns, dtype=torch.int8)


def asymmetric(own: Tensors) -> None:
    row_int8(own)
    for name in [n for n in own if n.endswith("weight_scale")]:
        points = torch.full(own[name].shape, 3, dtype=torch.int8)
        own[name.replace("weight_scale", "weight_zero_point")] = points


def test_what_cannot_be_read_is_refused_by_name(tiny: Tiny, tmp_path: Path) -> None:
    folder = edited(checkpoint(tiny), tmp_path / "q", change=packed)
    with pytest.raises(MissingTensor, match=r"layers\.0\.mlp\.up_proj\.weight_shape"):
        start(folder)


@pytest.mark.parametrize("form", ["asymmetric", "grouped"])
def test_integers_with_zero_points_and_in_groups_are_not_those_without(
    form: str, tiny: Tiny, tmp_path: Path
) -> None:
    """Zero points were once left out silently, which gave other weights than were stored."""
    change = asymmetric if form == "asymmetric" else grouped_int8
    folder = edited(checkpoint(tiny), tmp_path / "q", change=change)
    found = start(folder).model.trunk.state_dict()["layers.0.attention.o.weight"]
    plain = edited(checkpoint(tiny), tmp_path / "p", change=row_int8)
    wanted = start(plain).model.trunk.state_dict()["layers.0.attention.o.weight"]
    if form == "grouped":
        assert found.unique().tolist() == [torch.tensor(0.01).item()]
    else:
        step = (wanted - found).abs()
        assert (step > 0).all() and torch.allclose(step, step[:, :1].expand_as(step))


def test_a_trunk_tensor_that_is_missing_or_left_over_stops_the_start(
    tiny: Tiny, tmp_path: Path
) -> None:
    name = "model.layers.1.self_attn.v_proj.bias"
    lacking = edited(checkpoint(tiny), tmp_path / "a", change=lambda own: own.pop(name))
    with pytest.raises(MissingTensor, match=name):
        start(lacking)
    extra = edited(
        checkpoint(tiny), tmp_path / "b",
        change=lambda own: own.update({"model.layers.7.mlp.gate.weight": torch.zeros(1)}),
    )  # fmt: skip
    with pytest.raises(UnexpectedTensor, match=r"model\.layers\.7\.mlp\.gate\.weight"):
        start(extra)


def test_the_head_of_another_family_is_refused(tiny: Tiny) -> None:
    with pytest.raises(UnsupportedFamily, match="qwen3 head, the model is mimo"):
        start(checkpoint(tiny), head=checkpoint(tiny, "qwen3"))


def test_the_head_of_another_size_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="the head is for hidden 64"):
        start(checkpoint(tiny), head=checkpoint(tiny, hidden_size=64, vocab_size=32))


@pytest.mark.parametrize(
    "changes", [{"num_key_value_heads": 4}, {"head_dim": 32}, {"head_dim": 8}],
    ids=["more K/V heads", "wider heads", "narrower heads"],
)  # fmt: skip
def test_a_head_with_another_attention_geometry_drafts_without_loss(
    changes: dict[str, int], tiny: Tiny
) -> None:
    folder, other = checkpoint(tiny), checkpoint(tiny, **changes)
    expected = run(start(folder, speculate=0), make_prompts(), greedy())
    engine = start(folder, speculate=3, head=other, slots=200, max_batched_tokens=9)
    results = run(engine, make_prompts(), greedy())
    assert engine.stats.cached_tokens
    assert_head_is_alive(results)
    assert ids_of(results) == ids_of(expected)
    # The control: the head's own entries matter, so its acceptance is that of its own trunk.
    at_home = start(other, speculate=3, slots=200, max_batched_tokens=9)
    assert abs(_length(at_home) - engine.stats.acceptance.length) < 0.5


def _length(engine: Engine) -> float:
    run(engine, make_prompts(), greedy())
    return engine.stats.acceptance.length


def test_a_head_that_rotates_otherwise_is_refused_with_both_settings(tiny: Tiny) -> None:
    other = checkpoint(tiny, rope_theta=5000.0)
    with pytest.raises(ConfigError, match=r"rotates positions by .*theta=5000\.0.*the model by"):
        start(checkpoint(tiny), head=other)


def test_a_head_from_its_own_folder_drafts_like_the_one_inside(tiny: Tiny) -> None:
    folder = checkpoint(tiny)
    inside, beside = start(folder, speculate=3), start(folder, speculate=3, head=folder)
    first, second = (run(engine, make_prompts(), greedy()) for engine in (inside, beside))
    assert ids_of(first) == ids_of(second)
    assert inside.stats.acceptance == beside.stats.acceptance


def test_int8_weights_draft_and_decode_the_same_text(tiny: Tiny) -> None:
    common = {"dtype": "float32", "weights": "int8"}
    drafted = run(start(checkpoint(tiny), speculate=3, **common), make_prompts(), greedy())
    plain = run(start(checkpoint(tiny), speculate=0, **common), make_prompts(), greedy())
    assert_head_is_alive(drafted)
    assert ids_of(drafted) == ids_of(plain)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["mlp.up_proj.input_scale"], "scales of activations are not used (rows that are rounded"),
        (["self_attn.k_scale", "self_attn.v_scale"], "scales of keys and values are not used ("),
        (["mlp.up_proj.weight_scale"], "not applied, their weights are stored unquantised: model"),
    ],
    ids=["activations", "K/V", "stale"],
)
def test_scales_that_are_not_used_are_told(
    names: list[str], words: str, tiny: Tiny, tmp_path: Path
) -> None:
    """Regression: they were dropped without a word."""

    def add(own: Tensors) -> None:
        own.update({f"model.layers.0.{name}": torch.tensor([5.0]) for name in names})

    folder = edited(checkpoint(tiny), tmp_path / "s", change=add)
    assert any(note.startswith(words) for note in start(folder).notes)
    assert not any("not used" in note for note in start(checkpoint(tiny)).notes)


@pytest.mark.parametrize("name", ["mlp.router.weight_scale", "mlp.up_proj.weight_zp"])
def test_a_scale_of_nothing_is_refused(name: str, tiny: Tiny, tmp_path: Path) -> None:
    """And a zero point that its weight is not read with."""

    def add(own: Tensors) -> None:
        own[f"model.layers.0.{name}"] = torch.tensor([5.0])

    with pytest.raises(UnexpectedTensor, match=name):
        start(edited(checkpoint(tiny), tmp_path / "s", change=add))


@pytest.mark.parametrize("field", ["rotation_config", "spinquant_config"])
def test_turned_weights_are_refused(field: str, tiny: Tiny, tmp_path: Path) -> None:
    """At the top level of the config, where AutoRound writes it beside weights that are plain."""
    turned = {field: {"algorithm": "hadamard"}}
    folder = edited(checkpoint(tiny), tmp_path / "t", change_config=lambda c: c.update(turned))
    with pytest.raises(UnsupportedFamily, match=f"^{field} asks for turns of activations"):
        start(folder)
    inside = {"quantization_config": {"quant_method": "auto-round", **turned}}
    folder = edited(checkpoint(tiny), tmp_path / "i", change_config=lambda c: c.update(inside))
    with pytest.raises(UnsupportedFamily, match=f"^quantization_config.{field} asks for turns"):
        start(folder)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "foo"}, "device is 'foo'; give auto, cpu or cuda"),
        ({"device": "meta"}, "device is 'meta'; give"),
        ({"device": "cuda:99"}, "device 'cuda:99' was asked for and torch sees"),
        ({"dtype": "float16"}, "dtype float16 is for GPUs"),
        ({"dtype": "float8"}, "dtype is 'float8'; expected auto or float32, .*float16"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_device_or_number_format_that_is_not_there_is_refused(
    settings: dict[str, Any], words: str, tiny: Tiny
) -> None:
    with pytest.raises(ConfigError, match=words):
        start(checkpoint(tiny), **settings)
