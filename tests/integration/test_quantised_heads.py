"""Quantised heads and quantised models: carried whole, dequantised exactly, listed correctly.

Engines ask the list of unquantised modules with names of their own (fused, renumbered, moved). The
names below were read from the sources of vLLM and SGLang; a head that is missing under them is
built as quantised and accepts nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.head_edits import (
    WITH_HEAD,
    Tensors,
    config,
    differing,
    edited,
    export,
    graft,
    head_names,
    published,
    restore,
    stitch,
    tensors,
    text_part,
)
from support.long_runs import IS_LONG
from support.tiny_fixture import Tiny

from headstart.checkpoint.reader import Checkpoint
from headstart.errors import (
    BadConfig,
    CheckpointError,
    MissingTensor,
    ShapeMismatch,
    UnexpectedTensor,
)
from headstart.heads.formats import open_head
from headstart.heads.head import dequantize
from headstart.heads.inspection import inspect
from headstart.launch import LaunchOptions, build
from headstart.launch.versions import NEWEST
from headstart.models.build import build as build_model

BLOCK_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
CHANNEL_FP8 = {"quant_method": "compressed-tensors", "format": "float-quantized"}
CHANNEL_INT8 = {"quant_method": "compressed-tensors", "format": "int-quantized"}
Quantize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 with one scale per 128x128 block."""
    rows, columns = weight.shape
    scale = torch.zeros(-(-rows // 128), -(-columns // 128))
    stored = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scale[i, j] = weight[part].abs().max().float().clamp(min=1e-4) / 448
            stored[part] = (weight[part].float() / scale[i, j]).to(torch.float8_e4m3fn)
    return stored, scale


def from_blocks(stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, columns = stored.shape
    large = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return (stored.float() * large.float()).bfloat16()


def channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 with one scale per row."""
    scale = (weight.float().abs().amax(1, keepdim=True) / 448).bfloat16()
    return (weight.float() / scale.float()).to(torch.float8_e4m3fn), scale


def integers(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 with one scale per row."""
    scale = (weight.float().abs().amax(1, keepdim=True) / 127).bfloat16()
    return (weight.float() / scale.float()).round().clamp(-127, 127).to(torch.int8), scale


# scheme -> how to quantise, name of the scale, quantisation config
SCHEMES: dict[str, tuple[Quantize, str, dict[str, Any]]] = {
    "block_fp8": (blocks, "weight_scale_inv", BLOCK_FP8),
    "channel_fp8": (channels, "weight_scale", CHANNEL_FP8),
    "channel_int8": (integers, "weight_scale", CHANNEL_INT8),
}


def is_quantised_in_releases(name: str) -> bool:
    return name.endswith("_proj.weight") and "eh_proj" not in name and "input_proj" not in name


def quantized(folder: Path, out: Path, scheme: str) -> Path:
    """The checkpoint with every projection quantised, in trunk and head."""
    quantize, scale_name, method = SCHEMES[scheme]

    def change(contents: Tensors) -> None:
        for name in [n for n in contents if is_quantised_in_releases(n)]:
            stored, scale = quantize(contents[name])
            contents[name] = stored
            contents[name.removesuffix("weight") + scale_name] = scale

    def describe(document: dict[str, Any]) -> None:
        document["quantization_config"] = dict(method)

    return edited(folder, out, change=change, change_config=describe)


@pytest.fixture(scope="module")
def made(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`made("mimo", "block_fp8")`: a quantised tiny checkpoint, with or without its head."""
    folder = tmp_path_factory.mktemp("quantized")

    def get(variant: str, scheme: str, *, with_head: bool = True) -> Path:
        out = folder / f"{variant}-{scheme}-{with_head}"
        if not out.exists():
            quantized(tiny(variant, with_head=with_head), out, scheme)
        return out

    return get


Made = Callable[..., Path]
VARIANTS = ("deepseek_v3", "glm4_moe", "qwen3_5_moe", "mimo", "nemotron_h", "mimo_v2")
ALL = [(variant, scheme) for variant in VARIANTS for scheme in SCHEMES]
QUANTIZED = [pytest.param(*case, id="-".join(case)) for case in ALL]
# Formats take turns, and for what is done alike with every scheme schemes do; not in long runs.
CARRIED = [
    pytest.param(*case, form, id=f"{'-'.join(case)}-{form}")
    for number, case in enumerate(ALL)
    for turn, form in enumerate(("headstart", "sglang"))
    if IS_LONG or number % 2 == turn
]
IN_TURN = [case for n, case in enumerate(QUANTIZED) if IS_LONG or n % 3 == n // 3 % 3]


def listed(folder: Path, field: str) -> list[str]:
    names = config(folder)["quantization_config"][field]
    assert isinstance(names, list)
    return names


def test_large_copies_of_tables_do_not_make_a_quantised_head_a_plain_one(
    tiny: Tiny, tmp_path: Path
) -> None:
    """SGLang, told that the draft is not quantised, has no place for the scales of its weights."""
    model = quantized(tiny("glm4_moe_lite", vocab_size=2048), tmp_path / "model", "block_fp8")
    found = inspect(Checkpoint.open(model))
    tables = sum(t.nbytes for n, t in tensors(model).items() if n in _copies(model))
    assert tables > found.head.num_bytes / 2
    assert found.head.is_quantized and found.head.dtype == "F8_E4M3"
    assert found.as_json()["head"]["quantized"] is True
    built = build("sglang", found, LaunchOptions(), NEWEST["sglang"])
    assert "--speculative-draft-model-quantization" not in built.argv


def _copies(model: Path) -> set[str]:
    found = head_names(model)
    return {name for ours, name in found.items() if "embed_tokens" in ours or "lm_head" in ours}


def test_a_dequantised_head_with_a_fused_qkv_says_what_it_fits(tiny: Tiny, tmp_path: Path) -> None:
    def fuse(contents: Tensors) -> None:
        for module in range(3):
            at = f"model.mtp.layers.{module}.self_attn."
            parts = [contents.pop(f"{at}{part}_proj.weight") for part in "qkv"]
            contents[f"{at}qkv_proj.weight"] = torch.cat(parts)

    fused = edited(tiny("mimo_v2"), tmp_path / "fused", change=fuse)
    model = quantized(fused, tmp_path / "model", "block_fp8")
    said = inspect(Checkpoint.open(model)).warnings
    assert any("for as many ranks as K/V heads (2)" in text for text in said)
    head = open_head(model)
    assert any("tensor parallel size of as many" in text for text in dequantize(head).changes)


@pytest.mark.parametrize(("variant", "scheme"), QUANTIZED)
def test_a_quantised_head_is_complete(made: Made, variant: str, scheme: str) -> None:
    report = inspect(Checkpoint.open(made(variant, scheme)))
    assert report.head.is_usable
    assert report.head.missing == ()
    assert not [w for w in report.warnings if "scales" in w or "exclude" in w or "shape" in w]


@pytest.mark.parametrize(("variant", "scheme", "form"), CARRIED)
def test_a_quantised_head_is_carried_whole(
    made: Made, tmp_path: Path, variant: str, scheme: str, form: str
) -> None:
    model = made(variant, scheme)
    head = export(model, form, tmp_path / "head")
    result = stitch(head, made(variant, scheme, with_head=False), tmp_path / "result")
    assert differing(tensors(model), tensors(result)) == set()


@pytest.mark.parametrize(("variant", "scheme"), IN_TURN)
def test_a_quantised_head_is_restored_whole(
    made: Made, tmp_path: Path, variant: str, scheme: str
) -> None:
    model = made(variant, scheme)
    result = restore(made(variant, scheme, with_head=False), model, tmp_path / "result")
    assert differing(tensors(model), tensors(result)) == set()


@pytest.mark.parametrize("form", ["headstart", "xllm", "speculators"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_dequantising_gives_exactly_the_products(
    made: Made, tmp_path: Path, scheme: str, form: str
) -> None:
    model = made("glm4_moe", scheme)
    result = tensors(export(model, form, tmp_path / "head", dequantized=form == "headstart"))
    scale_name = SCHEMES[scheme][1]
    assert not [name for name in result if name.endswith(("_scale", "_scale_inv"))]
    stored = tensors(model)
    name = published(model, "0.block.self_attn.o_proj")
    weight, scale = stored[name], stored[name.removesuffix("weight") + scale_name]
    expected = (
        from_blocks(weight, scale)
        if scheme == "block_fp8"
        else (weight.float() * scale.float()).bfloat16()
    )
    found = next(t for n, t in result.items() if n.endswith("self_attn.o_proj.weight"))
    assert torch.equal(found, expected)
    assert {t.dtype for n, t in result.items() if "proj" in n} == {torch.bfloat16}


def test_fused_experts_are_dequantised_block_by_block(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("qwen3_5_moe", fused_experts=True)
    name = published(model, "experts.gate_up_proj")

    def change(contents: Tensors) -> None:
        parts = [blocks(expert) for expert in contents[name]]
        contents[name] = torch.stack([stored for stored, _ in parts])
        contents[f"{name}_scale_inv"] = torch.stack([scale for _, scale in parts])

    def describe(document: dict[str, Any]) -> None:
        document["quantization_config"] = dict(BLOCK_FP8)

    fp8 = edited(model, tmp_path / "model", change=change, change_config=describe)
    found = tensors(export(fp8, "headstart", tmp_path / "head", dequantized=True))
    contents = tensors(fp8)
    pairs = zip(contents[name], contents[f"{name}_scale_inv"], strict=True)
    expected = torch.stack([from_blocks(stored, scale) for stored, scale in pairs])
    assert torch.equal(found["modules.0.block.mlp.experts.gate_up_proj"], expected)
    carried = stitch(fp8, fp8, tmp_path / "carried")
    assert differing(contents, tensors(carried)) == set()


def test_rows_that_fill_no_whole_block_are_dequantised_too(tiny: Tiny, tmp_path: Path) -> None:
    small = tiny("mimo", intermediate_size=200)
    model = quantized(small, tmp_path / "model", "block_fp8")
    found = tensors(export(model, "headstart", tmp_path / "head", dequantized=True))
    name = published(model, "mlp.gate_proj.weight")
    expected = from_blocks(tensors(model)[name], tensors(model)[f"{name}_scale_inv"])
    assert torch.equal(found["modules.0.block.mlp.gate_proj.weight"], expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_dequantised_head_replaces_a_quantised_one_and_its_scales(
    made: Made, tmp_path: Path, scheme: str
) -> None:
    model = made("deepseek_v3", scheme)
    result = stitch(model, model, tmp_path / "result", dequantized=True)
    head = head_names(result)
    assert not [ours for ours in head if ours.endswith(("_scale", "_scale_inv"))]
    changed = differing(tensors(model), tensors(result))
    assert changed <= set(head_names(model).values())
    report = inspect(Checkpoint.open(result))
    assert report.head.state == "complete"
    assert not [w for w in report.warnings if "exclude" in w or "scale" in w]


@pytest.mark.parametrize("target", ["channel_fp8", "channel_int8", None], ids=str)
def test_a_scheme_that_the_model_does_not_describe_is_refused(
    tiny: Tiny, made: Made, tmp_path: Path, target: str | None
) -> None:
    model = made("mimo", target) if target else tiny("mimo")
    with pytest.raises(CheckpointError, match=r"head is quantised .* Add --dequantize"):
        stitch(made("mimo", "block_fp8"), model, tmp_path / "result")
    stitch(made("mimo", "block_fp8"), model, tmp_path / "plain", dequantized=True)


def test_eight_bit_floats_and_integers_do_not_mix(made: Made, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="format is 'float-quantized' there"):
        stitch(made("mimo", "channel_fp8"), made("mimo", "channel_int8"), tmp_path / "result")


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_channel_scaled_head_is_refused_by_four_bit_models(
    tiny: Tiny, made: Made, tmp_path: Path, method: str
) -> None:
    def describe(document: dict[str, Any]) -> None:
        document["quantization_config"] = {"quant_method": method, "bits": 4}

    model = edited(tiny("mimo"), tmp_path / "model", change_config=describe)
    with pytest.raises(CheckpointError, match="head is quantised"):
        stitch(made("mimo", "channel_fp8"), model, tmp_path / "result")


def test_quantised_experts_are_not_moved_between_layouts(
    tiny: Tiny, made: Made, tmp_path: Path
) -> None:
    model = with_method(
        tiny("qwen3_5_moe", fused_experts=True), tmp_path / "model", dict(BLOCK_FP8)
    )
    with pytest.raises(CheckpointError, match="another layout than the model's"):
        stitch(made("qwen3_5_moe", "block_fp8"), model, tmp_path / "result")


def test_a_pattern_that_excludes_a_quantised_head_is_refused(made: Made, tmp_path: Path) -> None:
    def exclude(document: dict[str, Any]) -> None:
        document["quantization_config"]["ignore"] = ["lm_head", "re:^mtp.*"]

    model = edited(made("qwen3_5_moe", "channel_fp8"), tmp_path / "model", change_config=exclude)
    with pytest.raises(CheckpointError, match="a pattern in the model's quantisation config"):
        stitch(made("qwen3_5_moe", "channel_fp8"), model, tmp_path / "result")


def test_a_quantised_head_leaves_the_list_of_unquantised_modules(
    tiny: Tiny, made: Made, tmp_path: Path
) -> None:
    bare = made("mimo", "channel_fp8", with_head=False)
    plain = stitch(tiny("mimo"), bare, tmp_path / "plain")
    names = [n for n in listed(plain, "ignore") if "self_attn" in n]
    assert names
    result = stitch(made("mimo", "channel_fp8"), plain, tmp_path / "result")
    assert not set(names) & set(listed(result, "ignore"))
    assert "model.mtp_layers.0.input_proj" in listed(result, "ignore")


# per variant: names under which vLLM, then SGLang, ask for modules of the head (3 trunk layers)
ASKED = {
    "deepseek_v3": [
        "model.layers.3.self_attn.fused_qkv_a_proj",
        "model.layers.3.self_attn.q_b_proj",
        "model.layers.3.mlp.experts",
        "model.layers.3.mlp.experts.0.gate_proj",
        "model.layers.3.mlp.shared_experts.gate_up_proj",
        "model.decoder.self_attn.fused_qkv_a_proj_with_mqa",
        "model.decoder.self_attn.kv_b_proj",
        "model.decoder.mlp.experts",
        "model.eh_proj",
    ],
    "deepseek_v4": [
        "model.layers.3.attn.fused_wqa_wkv",
        "model.layers.3.ffn.experts",
        "model.layers.3.ffn.shared_experts.gate_up_proj",
        "model.layers.3.ffn.shared_experts.down_proj",
        "model.layers.3.e_proj",
        "model.decoder.self_attn.wqkv_a",
        "model.decoder.self_attn.wo_b",
        "model.decoder.mlp.experts",
        "model.decoder.mlp.shared_experts.gate_up_proj",
        "model.h_proj",
    ],
    "glm4_moe": [
        "model.layers.3.self_attn.qkv_proj",
        "model.layers.3.mlp.shared_experts.gate_up_proj",
        "model.decoder.self_attn.qkv_proj",
        "model.decoder.mlp.experts",
    ],
    "qwen3_next": ["mtp.fc", "mtp.layers.0.self_attn.qkv_proj", "mtp.layers.0.mlp.experts"],
    "qwen3_5": [
        "mtp.fc",
        "mtp.layers.0.self_attn.qkv_proj",
        "mtp.layers.0.mlp.gate_up_proj",
        "mtp.layers.0.mlp.down_proj",
    ],
    "qwen3_5_moe": [
        "mtp.layers.0.mlp.experts",
        "mtp.layers.0.mlp.experts.0.down_proj",
        "mtp.layers.0.mlp.shared_expert.gate_up_proj",
    ],
    "mimo": ["model.layers.3.self_attn.qkv_proj", "model.layers.3.mlp.gate_up_proj"],
    "mimo_v2": ["model.mtp.layers.0.self_attn.qkv_proj", "model.decoder.mlp.gate_up_proj"],
    "step3p5": [
        "model.layers.3.mtp_block.self_attn.qkv_proj",
        "model.layers.5.mtp_block.self_attn.g_proj",
        "model.layers.4.mtp_block.mlp.gate_up_proj",
    ],
    "ernie4_5_moe": [
        "model.layers.3.self_attn.qkv_proj",
        "model.mtp_block.self_attn.qkv_proj",
        "model.mtp_block.mlp.gate_up_proj",
    ],
    "nemotron_h": [
        "mtp.layers.0.eh_proj",
        "mtp.layers.0.mixer.qkv_proj",
        "mtp.layers.1.mixer.experts",
        "mtp.layers.1.mixer.shared_experts.up_proj",
        "mtp.layers.1.mixer.fc1_latent_proj",
    ],
}  # fmt: skip


def with_method(model: Path, out: Path, quantization: dict[str, Any]) -> Path:
    def describe(document: dict[str, Any]) -> None:
        document["quantization_config"] = quantization

    return edited(model, out, change_config=describe)


def linear_modules(model: Path, folder: Path) -> set[str]:
    """Checkpoint names of the head's matrices."""
    stored = tensors(folder)
    return {
        name.removesuffix(".weight")
        for ours, name in head_names(model).items()
        if name.endswith(".weight")
        and stored[name].ndim == 2
        and ours.split(".")[2] not in ("embed_tokens", "lm_head")
    }


@pytest.mark.parametrize("variant", WITH_HEAD)
def test_a_restored_head_is_listed_under_checkpoint_names(
    tiny: Tiny, tmp_path: Path, variant: str
) -> None:
    method = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
    model = with_method(tiny(variant, with_head=False), tmp_path / "model", method)
    result = restore(model, tiny(variant), tmp_path / "result")
    names = listed(result, "ignore")
    assert names[0] == "lm_head"
    assert linear_modules(tiny(variant), result) <= set(names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("variant", ASKED)
def test_a_restored_head_is_listed_under_the_names_that_engines_ask_for(
    tiny: Tiny, tmp_path: Path, variant: str
) -> None:
    method = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
    model = with_method(tiny(variant, with_head=False), tmp_path / "model", method)
    result = restore(model, tiny(variant), tmp_path / "result")
    trunk_layers = text_part(config(model))["num_hidden_layers"]
    asked = {name.replace("layers.3", f"layers.{trunk_layers}", 1) for name in ASKED[variant]}
    if variant == "step3p5":
        asked = set(ASKED[variant])
    assert asked <= set(listed(result, "ignore"))


@pytest.mark.parametrize("variant", WITH_HEAD)
def test_no_module_of_the_trunk_is_listed_by_accident(
    tiny: Tiny, tmp_path: Path, variant: str
) -> None:
    """SGLang asks for a Qwen3-Next head as layer 0, for MiMo's without prefix: not to be listed."""
    bare = tiny(variant, with_head=False)
    model = with_method(bare, tmp_path / "model", {"quant_method": "awq", "bits": 4})
    result = restore(model, tiny(variant), tmp_path / "result")
    names = listed(result, "modules_to_not_convert")
    modules = {name.removesuffix(".weight") for name in tensors(bare)}
    hit = {m for m in modules for name in names if name in m}  # AWQ lists match anywhere
    assert hit == set()


def test_fused_experts_are_listed_as_engines_ask_for_them(tiny: Tiny, tmp_path: Path) -> None:
    bare = tiny("qwen3_5_moe", with_head=False)
    model = with_method(bare, tmp_path / "model", dict(CHANNEL_FP8))
    fused = tiny("qwen3_5_moe", fused_experts=True)
    names = listed(restore(model, fused, tmp_path / "result"), "ignore")
    assert {"mtp.layers.0.mlp.experts", "mtp.layers.0.mlp.experts.0.gate_proj"} <= set(names)


@pytest.mark.parametrize(
    ("quantization", "field"),
    [
        ({"quant_method": "compressed-tensors"}, "ignore"),
        ({"quant_method": "fp8"}, "modules_to_not_convert"),
        ({"quant_method": "fp8", "ignored_layers": ["lm_head"]}, "ignored_layers"),
        ({"quant_method": "awq"}, "modules_to_not_convert"),
        ({"quant_method": "quark", "exclude": ["lm_head"]}, "exclude"),
        ({"quant_method": "modelopt", "ignore": ["lm_head"]}, "ignore"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["quant_method"],
)
def test_each_method_has_its_list_where_engines_read_it(
    tiny: Tiny, tmp_path: Path, quantization: dict[str, Any], field: str
) -> None:
    model = with_method(tiny("mimo", with_head=False), tmp_path / "model", quantization)
    result = restore(model, tiny("mimo"), tmp_path / "result")
    names = listed(result, field)
    assert {"model.mtp_layers.0.self_attn.q_proj", "model.layers.3.self_attn.qkv_proj"} <= set(
        names
    )
    assert set(quantization.get(field, [])) <= set(names)
    assert not [w for w in inspect(Checkpoint.open(result)).warnings if "exclude" in w]


def test_gptq_is_told_by_rules(tiny: Tiny, tmp_path: Path) -> None:
    method = {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}}
    model = with_method(tiny("qwen3_5", with_head=False), tmp_path / "model", method)
    result = restore(model, tiny("qwen3_5"), tmp_path / "result")
    rules = config(result)["quantization_config"]["dynamic"]
    assert rules["+:.*down.*"] == {"bits": 8}
    assert r"-:^mtp\.layers\.0\.self_attn\.qkv_proj$" in rules
    assert r"-:^mtp\.fc$" in rules
    assert not [w for w in inspect(Checkpoint.open(result)).warnings if "exclude" in w]


def test_modelopt_is_told_in_its_own_file(tiny: Tiny, tmp_path: Path) -> None:
    listing = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    bare = tiny("qwen3_5_moe", with_head=False)
    model = edited(bare, tmp_path / "model", files={"hf_quant_config.json": listing})
    result = restore(model, tiny("qwen3_5_moe"), tmp_path / "result")
    written = json.loads((result / "hf_quant_config.json").read_text())["quantization"]
    assert written["quant_algo"] == "NVFP4"
    assert {"lm_head", "mtp.fc", "mtp.layers.0.mlp.experts"} <= set(written["exclude_modules"])
    assert not [w for w in inspect(Checkpoint.open(result)).warnings if "exclude" in w]


def test_modelopts_own_file_is_looked_at_by_inspect(tiny: Tiny, tmp_path: Path) -> None:
    listing = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    files = {"hf_quant_config.json": listing}
    model = edited(tiny("qwen3_5_moe"), tmp_path / "model", files=files)
    warnings = inspect(Checkpoint.open(model)).warnings
    assert [w for w in warnings if "does not exclude the head's modules" in w]


def test_a_method_without_a_known_list_is_told_to_the_user(tiny: Tiny, tmp_path: Path) -> None:
    from headstart.heads.formats import open_head
    from headstart.heads.stitch import plan_stitch

    bare = tiny("mimo", with_head=False)
    model = with_method(bare, tmp_path / "model", {"quant_method": "vptq"})
    operation = plan_stitch(open_head(tiny("mimo")), Checkpoint.open(model))
    assert "'vptq' keeps no list" in operation.describe()


def test_a_list_under_checkpoint_names_only_is_reported(tiny: Tiny, tmp_path: Path) -> None:
    names = sorted(linear_modules(tiny("mimo"), tiny("mimo")))
    method = {"quant_method": "compressed-tensors", "ignore": names}
    model = with_method(tiny("mimo"), tmp_path / "model", method)
    warnings = inspect(Checkpoint.open(model)).warnings
    assert [w for w in warnings if "vLLM asks for model.layers.3." in w]


@pytest.mark.parametrize("entry", ["re:.*mtp.*", "re:^mtp.*"])
def test_a_pattern_in_the_list_is_understood(tiny: Tiny, tmp_path: Path, entry: str) -> None:
    method = {"quant_method": "compressed-tensors", "ignore": [entry]}
    model = with_method(tiny("qwen3_5"), tmp_path / "model", method)
    assert not [w for w in inspect(Checkpoint.open(model)).warnings if "exclude" in w]


def test_a_pattern_that_would_never_end_does_not_stop_inspect(tiny: Tiny, tmp_path: Path) -> None:
    method = {"quant_method": "compressed-tensors", "ignore": ["re:([a-z0-9._]+)+!"]}
    model = with_method(tiny("qwen3_5"), tmp_path / "model", method)
    warnings = inspect(Checkpoint.open(model)).warnings
    assert [w for w in warnings if "whether the head's modules are excluded is not known" in w]


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "a list of strings"),
        ({"quant_method": "compressed-tensors", "ignore": 5}, "a list of strings"),
        ({"quant_method": "compressed-tensors", "ignore": [{}]}, "a list of strings"),
        ({"quant_method": "gptq", "dynamic": []}, "an object"),
    ],
    ids=["text", "number", "objects", "rules"],
)
def test_a_list_of_another_kind_is_refused(
    tiny: Tiny, tmp_path: Path, method: dict[str, Any], said: str
) -> None:
    model = with_method(tiny("mimo"), tmp_path / "model", method)
    with pytest.raises(BadConfig, match=rf"quantization_config\.\w+ is .*; expected {said}"):
        Checkpoint.open(model)


def test_modelopts_own_list_of_another_kind_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    files = {"hf_quant_config.json": {"quantization": {"exclude_modules": "lm_head"}}}
    model = edited(tiny("mimo"), tmp_path / "model", files=files)
    with pytest.raises(BadConfig, match=r"quantization\.exclude_modules is 'lm_head'"):
        inspect(Checkpoint.open(model))


def test_stale_scales_disappear_when_the_head_is_stitched_again(
    tiny: Tiny, made: Made, tmp_path: Path
) -> None:
    """A tool that writes BF16 weights over FP8 ones leaves the scales behind."""
    model, plain = made("deepseek_v3", "block_fp8"), tensors(tiny("deepseek_v3"))
    names = set(head_names(tiny("deepseek_v3")).values())

    def overwrite(contents: Tensors) -> None:
        contents.update({name: plain[name] for name in names})

    broken = edited(model, tmp_path / "broken", change=overwrite)
    assert [w for w in inspect(Checkpoint.open(broken)).warnings if "beside weights" in w]
    result = stitch(tiny("deepseek_v3"), broken, tmp_path / "result")
    assert set(head_names(result).values()) == names
    assert not [w for w in inspect(Checkpoint.open(result)).warnings if "beside weights" in w]


def test_the_total_size_follows_the_stitched_head(tiny: Tiny, made: Made, tmp_path: Path) -> None:
    sharded = tiny("deepseek_v3", shard_bytes=400_000)
    result = stitch(made("deepseek_v3", "block_fp8"), sharded, tmp_path / "r", dequantized=True)
    index = json.loads((result / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(result).values())
    larger = stitch(tiny("deepseek_v3", dtype="F32"), sharded, tmp_path / "larger")
    total = json.loads((larger / "model.safetensors.index.json").read_text())["metadata"]
    assert total["total_size"] == sum(t.nbytes for t in tensors(larger).values())
    assert total["total_size"] > index["metadata"]["total_size"]


def v4(tiny: Tiny, out: Path, *, four_bit: bool) -> Path:
    """DeepSeek-V4's own scheme: `.scale` beside each weight, E8M0 beside FP4 experts."""

    def change(contents: Tensors) -> None:
        for name in [n for n in contents if n.endswith(".weight") and _is_v4_linear(n)]:
            weight, scale_name = contents[name], name.removesuffix("weight") + "scale"
            if four_bit and ".experts." in name:
                rows, columns = weight.shape
                packed = torch.arange(rows * columns // 2) % 251 - 120
                contents[name] = packed.to(torch.int8).reshape(rows, columns // 2)
                exponents = torch.arange(rows * columns // 32, dtype=torch.int64) % 200 + 20
                raw = exponents.to(torch.uint8).reshape(rows, columns // 32)
                contents[scale_name] = raw.view(torch.float8_e8m0fnu)
            else:
                contents[name], contents[scale_name] = blocks(weight)

    def describe(document: dict[str, Any]) -> None:
        document["quantization_config"] = dict(BLOCK_FP8)
        document["expert_dtype"] = "fp4" if four_bit else "fp8"

    return edited(tiny("deepseek_v4"), out, change=change, change_config=describe)


def _is_v4_linear(name: str) -> bool:
    module = name.removesuffix(".weight").rpartition(".")[2]
    return module.startswith("w") or module in ("e_proj", "h_proj")


@pytest.mark.parametrize("form", ["headstart", "sglang", "xllm"])
def test_the_scales_of_deepseek_v4_are_carried_bit_for_bit(
    tiny: Tiny, tmp_path: Path, form: str
) -> None:
    model = v4(tiny, tmp_path / "model", four_bit=True)
    assert inspect(Checkpoint.open(model)).head.state == "complete"
    head = export(model, form, tmp_path / "head")
    names = set(head_names(model).values())
    bare = edited(model, tmp_path / "bare", change=lambda t: [t.pop(name) for name in names])
    result = stitch(head, bare, tmp_path / "result")
    assert differing(tensors(model), tensors(result)) == set()


def test_the_fp8_of_deepseek_v4_is_dequantised_exactly(tiny: Tiny, tmp_path: Path) -> None:
    model = v4(tiny, tmp_path / "model", four_bit=False)
    found = tensors(export(model, "headstart", tmp_path / "head", dequantized=True))
    stored = tensors(model)
    expected = from_blocks(stored["mtp.0.e_proj.weight"], stored["mtp.0.e_proj.scale"])
    assert torch.equal(found["modules.0.fuse_embed.weight"], expected)
    assert set(found) == set(head_names(tiny("deepseek_v4")))


_FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def test_four_bit_experts_and_blocks_of_powers_are_dequantised_exactly(
    tiny: Tiny, tmp_path: Path
) -> None:
    """As DeepSeek-V4 stores them: two codes in a byte, the low one first, a power for 32."""

    def to_powers(contents: Tensors) -> None:
        raw = contents["mtp.0.e_proj.scale"]
        contents["mtp.0.e_proj.scale"] = torch.full_like(raw, 0.25).to(torch.float8_e8m0fnu)

    model = v4(tiny, tmp_path / "model", four_bit=True)
    model = edited(model, tmp_path / "powers", change=to_powers)
    stored = tensors(model)
    found = tensors(export(model, "headstart", tmp_path / "head", dequantized=True))
    expected = stored["mtp.0.e_proj.weight"].float() * 0.25
    assert torch.equal(found["modules.0.fuse_embed.weight"].float(), expected.bfloat16().float())
    name = "ffn.experts.1.w2"
    packed = stored[f"mtp.0.{name}.weight"].view(torch.uint8)
    exponents = stored[f"mtp.0.{name}.scale"].view(torch.uint8)
    rows = [
        [
            (-1) ** (code >> 3)
            * _FOUR_BITS[code & 7]
            * 2.0 ** (int(exponents[0, place // 32]) - 127)
            for place, code in enumerate(c for byte in row for c in (byte & 15, byte >> 4))
        ]
        for row in packed[:1].tolist()
    ]
    ours = found[f"modules.0.block.{name}.weight"][:1]
    assert torch.equal(ours, torch.tensor(rows).to(ours.dtype))


def test_a_scale_of_another_weight_is_refused(made: Made, tmp_path: Path) -> None:
    name = published(made("mimo", "block_fp8"), "o_proj.weight")

    def change(contents: Tensors) -> None:
        contents[f"{name}_scale_inv"] = torch.ones(5, 7)

    model = edited(made("mimo", "block_fp8"), tmp_path / "model", change=change)
    with pytest.raises(ShapeMismatch, match="do not belong together"):
        export(model, "headstart", tmp_path / "head", dequantized=True)


def test_scales_that_no_weight_of_a_head_uses_are_told_or_refused(
    made: Made, tmp_path: Path
) -> None:
    model = made("mimo", "block_fp8")
    module = published(model, "modules.0.block.mlp.down_proj.weight").removesuffix(".weight")

    def broken(name: str) -> Path:
        extra = {f"{module}.{name}": torch.ones(1)}
        return edited(model, tmp_path / name, change=lambda own: own.update(extra))

    told = Checkpoint.open(broken("input_scale"))
    stay = "scales of activations are not used "
    assert [c for c in dequantize(open_head(told.folder)).changes if c.startswith(stay)]
    notes = build_model(told, device="cpu", dtype="float32").notes
    assert [note for note in notes if note.startswith(f"head: {stay}")]
    other = broken("weight_scale_2")
    with pytest.raises(UnexpectedTensor, match=r"1 scales belong to no weight .*weight_scale_2"):
        dequantize(open_head(other))
    with pytest.raises(UnexpectedTensor, match=r"no place in this model: .*weight_scale_2"):
        build_model(Checkpoint.open(other), device="cpu", dtype="float32")


def test_a_packed_head_without_its_scale_is_carried_but_not_dequantised(
    tiny: Tiny, tmp_path: Path
) -> None:
    name = published(tiny("mimo"), "o_proj.weight")

    def change(contents: Tensors) -> None:
        rows, columns = contents.pop(name).shape
        contents[f"{name}_packed"] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
        contents[f"{name}_scale"] = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)

    model = with_method(
        edited(tiny("mimo"), tmp_path / "packed", change=change),
        tmp_path / "model",
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    )
    head = export(model, "headstart", tmp_path / "head")
    assert differing(tensors(model), tensors(stitch(head, model, tmp_path / "same"))) == set()
    with pytest.raises(MissingTensor, match="weight_global_scale is missing"):
        export(model, "xllm", tmp_path / "xllm")


def test_an_ascend_description_follows_the_renamed_tensors(tiny: Tiny, tmp_path: Path) -> None:
    listing = {
        "model.layers.3.eh_proj.weight": "FLOAT",
        "model.layers.3.mlp.gate.weight": "FLOAT",
        "model.layers.2.mlp.gate.weight": "W8A8",
    }
    files = {"quant_model_description.json": listing}
    model = edited(tiny("deepseek_v3"), tmp_path / "model", files=files)
    head = export(model, "xllm", tmp_path / "head")
    written = json.loads((head / "quant_model_description.json").read_text())
    assert written == {"model.eh_proj.weight": "FLOAT", "model.layers.0.mlp.gate.weight": "FLOAT"}


@pytest.mark.parametrize("variant", ["deepseek_v3", "mimo"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_head_grafted_onto_a_quantised_trunk_is_plain_and_listed(
    made: Made, tmp_path: Path, scheme: str, variant: str
) -> None:
    source = made(variant, scheme, with_head=False)
    model = graft(source, tmp_path / "model")
    stored = tensors(model)
    names = head_names(model)
    assert {stored[name].dtype for name in names.values()} <= {torch.bfloat16, torch.float32}
    name = "model.layers.2.self_attn.o_proj."
    weight, scale = stored[f"{name}weight"], stored[name + SCHEMES[scheme][1]]
    expected = (
        from_blocks(weight, scale)
        if scheme == "block_fp8"
        else (weight.float() * scale.float()).bfloat16()
    )
    assert torch.equal(stored[names["modules.0.block.self_attn.o_proj.weight"]], expected)
    assert not [w for w in inspect(Checkpoint.open(model)).warnings if "exclude" in w]
    before = tensors(source)
    assert differing(before, {name: stored[name] for name in before}) == set()


def test_quantised_trunks_keep_their_files(made: Made, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(made("mimo", "block_fp8"), model)
    (model / "recipe.yaml").write_text("scheme: FP8_BLOCK\n")
    result = stitch(model, model, tmp_path / "result")
    assert (result / "recipe.yaml").read_text() == "scheme: FP8_BLOCK\n"
