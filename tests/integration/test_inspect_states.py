"""What `inspect` says of whole, lost, broken and misdeclared heads, in every family."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.commands import headstart
from support.head_edits import (
    WITH_HEAD,
    config,
    differing,
    edited,
    head_names,
    published,
    stitch,
    tensors,
    text_part,
    with_dense_head,
)
from support.long_runs import IS_LONG, one_of_each
from support.tiny_fixture import Tiny

from headstart.checkpoint.config import COUNT_FIELDS
from headstart.checkpoint.reader import Checkpoint
from headstart.cli.inspect_view import show
from headstart.errors import CheckpointError, HeadNotFound
from headstart.heads.detection import find_head, require_head
from headstart.heads.inspection import Report, inspect
from headstart.launch import LaunchOptions, build
from headstart.launch.versions import NEWEST

# Families whose configs carry no count: their heads are normally not declared.
WITHOUT_COUNT = ("qwen3_next", "mimo_v2")
DECLARED = [variant for variant in WITH_HEAD if variant not in WITHOUT_COUNT]
WITH_EXPERTS = [
    "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
    "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "nemotron_h", "mellum", "glm5_next", "hy_v4",
    "qwen4_exp", "gigachat3_5", "openpangu_v2", "bailing_moe_v2", "bailing_moe_v3",
]  # fmt: skip
UNFUSED = ("deepseek_v4", "nemotron_h")  # other projections: never stored fused
MODULES = {"mimo_v2": 3, "step3p5": 3, "gigachat3_5": 2, "openpangu_v2": 3}
# one tensor of each part is lost; families take turns, unless runs are long
PARTS = ("role", "fusion", "block", "last")
LOSSES = [
    pytest.param(variant, part, id=f"{variant}-{part}")
    for number, variant in enumerate(WITH_HEAD)
    for turn, part in enumerate(PARTS)
    if IS_LONG or number % len(PARTS) == turn
]
COUNTS = [
    pytest.param(variant, value, id=f"{variant}-{name}")
    for number, variant in enumerate(DECLARED)
    for turn, (name, value) in enumerate({"zero": 0, "removed": None}.items())
    if IS_LONG or number % 2 == turn
]
# tensors of a tiny head; copies of embedding and LM head included where releases store them
NUM_TENSORS = {
    "deepseek_v3": 32, "deepseek_v32": 37, "deepseek_v4": 43, "glm4_moe": 34,
    "glm4_moe_lite": 32, "glm_moe_dsa": 37, "qwen3_next": 29, "qwen3_5": 15, "qwen3_5_text": 15,
    "qwen3_5_moe": 29, "qwen3_5_moe_text": 29, "qwen3": 15, "mimo": 16, "mimo_v2": 42,
    "ernie4_5_moe": 12, "nemotron_h": 24, "step3p5": 51, "mellum": 25, "glm5_next": 39,
    "hy_v4": 37, "qwen4_exp": 41, "motif": 19, "gigachat3_5": 106, "openpangu_v2": 117,
    "bailing_moe_v2": 27, "bailing_moe_v3": 29, "exaone_moe": 15, "exaone4_5": 15,
    "qwen3_moe": 15,
}  # fmt: skip
# per token and module, in elements; K/V is counted in 16 bits
KV_ELEMENTS = {
    "deepseek_v3": 512 + 64,
    "deepseek_v32": 512 + 64 + 128,
    "glm4_moe": 2 * 2 * 64,
    "qwen3_5": 2 * 2 * 64,
    "mimo_v2": 3 * 4 * (48 + 32),
    "step3p5": 3 * 2 * 2 * 64,
    "glm5_next": 48 + 32,
    "hy_v4": 48 + 8 + 32,
    "qwen4_exp": 2 * 2 * 64 + 64,
    "motif": 2 * (64 + 32),
}


def report(folder: Path) -> Report:
    return inspect(Checkpoint.open(folder))


def warned(folder: Path, text: str) -> bool:
    return any(text in warning for warning in report(folder).warnings)


def without(names: list[str]) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(contents: dict[str, torch.Tensor]) -> None:
        for name in names:
            del contents[name]

    return change


def set_count(value: int | None) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        for field in COUNT_FIELDS:
            if text_part(document).pop(field, None) is not None and value is not None:
                text_part(document)[field] = value

    return change


@pytest.mark.parametrize("variant", WITH_HEAD)
def test_a_whole_head_is_complete(tiny: Tiny, variant: str) -> None:
    head = report(tiny(variant)).head
    assert head.state == ("undeclared" if variant in WITHOUT_COUNT else "complete")
    assert head.missing == ()
    assert head.modules == MODULES.get(variant, 1)
    assert head.tensors == NUM_TENSORS[variant]


@pytest.mark.parametrize("variant", one_of_each(2, WITH_HEAD))
def test_a_whole_head_gives_no_cause_for_worry(tiny: Tiny, variant: str) -> None:
    expected = ("hybrid", "vLLM uses the first", "is not settled")
    others = [w for w in report(tiny(variant)).warnings if not any(text in w for text in expected)]
    assert others == []


def test_what_engines_disagree_about_is_said(tiny: Tiny) -> None:
    assert warned(tiny("openpangu_v2"), "ik_llama.cpp after them; which one the weights")
    assert warned(tiny("nemotron_h"), "subtracts the mean in llama.cpp")


@pytest.mark.parametrize("variant", ["qwen3_5_text", "qwen3_next"])
def test_names_that_engines_skip_are_reported(tiny: Tiny, variant: str) -> None:
    model = tiny(variant, root="model.")
    assert warned(model, f"stitch {model} {model} --out DIR` writes names that they read")


@pytest.mark.parametrize("variant", [v for v in WITH_EXPERTS if v not in UNFUSED])
def test_a_fused_head_is_complete_too(tiny: Tiny, variant: str) -> None:
    head = report(tiny(variant, fused_experts=True)).head
    assert head.missing == ()
    assert head.is_usable
    assert head.experts == "fused"


@pytest.mark.parametrize("variant", one_of_each(2, WITH_HEAD))
def test_a_lost_head_is_missing(tiny: Tiny, variant: str) -> None:
    bare = report(tiny(variant, with_head=False))
    declared = variant not in WITHOUT_COUNT
    assert bare.head.state == ("declared-but-missing" if declared else "absent")
    assert any("headstart restore" in warning for warning in bare.warnings)


@pytest.mark.parametrize("variant", one_of_each(2, DECLARED))
def test_a_lost_head_that_is_not_declared_is_absent(
    tiny: Tiny, tmp_path: Path, variant: str
) -> None:
    bare = tiny(variant, with_head=False)
    for number, value in enumerate((0, None)):
        model = edited(bare, tmp_path / str(number), change_config=set_count(value))
        assert report(model).head.state == "absent"


@pytest.mark.parametrize(("variant", "value"), one_of_each(2, COUNTS))
def test_a_whole_head_without_a_count_is_undeclared(
    tiny: Tiny, tmp_path: Path, variant: str, value: int | None
) -> None:
    model = edited(tiny(variant), tmp_path / "model", change_config=set_count(value))
    result = report(model)
    assert result.head.state == "undeclared"
    assert any("does not declare them" in warning for warning in result.warnings)


@pytest.mark.parametrize(("variant", "part"), one_of_each(2, LOSSES))
def test_a_head_that_lost_one_tensor_is_partial(
    tiny: Tiny, tmp_path: Path, variant: str, part: str
) -> None:
    model = tiny(variant)
    names = head_names(model)
    block = [name for ours, name in names.items() if ".block." in ours]
    lost = {
        "role": published(model, "modules.0.embed_norm.weight"),
        "fusion": published(model, "modules.0.fuse"),
        "block": block[0],
        "last": block[-1],
    }[part]
    broken = edited(model, tmp_path / "model", change=without([lost]))
    head = report(broken).head
    assert head.state == "partial"
    assert head.missing == (lost,)
    assert warned(broken, "1 head tensor missing")


@pytest.mark.parametrize("variant", WITH_EXPERTS)
def test_a_head_that_lost_one_expert_is_partial(tiny: Tiny, tmp_path: Path, variant: str) -> None:
    model = tiny(variant)
    lost = [name for ours, name in head_names(model).items() if ".experts.2." in ours]
    head = report(edited(model, tmp_path / "model", change=without(lost))).head
    assert head.state == "partial"
    assert set(head.missing) == set(lost)


@pytest.mark.parametrize("variant", ["mimo_v2", "step3p5"])
def test_a_head_that_lost_a_module_is_partial(tiny: Tiny, tmp_path: Path, variant: str) -> None:
    model = tiny(variant)
    lost = [name for ours, name in head_names(model).items() if ours.startswith("modules.2.")]
    head = report(edited(model, tmp_path / "model", change=without(lost))).head
    assert (head.state, head.modules) == ("partial", 2)
    assert set(head.missing) == set(lost)


@pytest.mark.parametrize("variant", ["deepseek_v3", "glm4_moe", "deepseek_v4"])
def test_copies_of_embedding_and_lm_head_may_be_left_out(
    tiny: Tiny, tmp_path: Path, variant: str
) -> None:
    model = tiny(variant)
    copies = [published(model, "0.embed_tokens"), published(model, "0.lm_head")]
    result = report(edited(model, tmp_path / "model", change=without(copies)))
    assert result.head.state == "complete"
    assert set(result.head.shares.values()) == {"from the trunk"}
    assert set(report(model).head.shares.values()) == {"identical copy"}


@pytest.mark.parametrize("variant", ["glm4_moe", "step3p5"])
def test_an_lm_head_that_is_no_copy_is_the_heads_own(
    tiny: Tiny, tmp_path: Path, variant: str
) -> None:
    model = tiny(variant)

    def change(contents: dict[str, torch.Tensor]) -> None:
        contents[published(model, "0.lm_head")] *= 2

    result = report(edited(model, tmp_path / "model", change=change))
    assert result.head.shares["lm_head"] == "own"
    is_surprise = any("differs from the trunk's" in warning for warning in result.warnings)
    assert is_surprise == (variant != "step3p5")


@pytest.mark.parametrize("variant", KV_ELEMENTS)
def test_the_memory_of_a_head_is_told(tiny: Tiny, variant: str) -> None:
    model = tiny(variant)
    head = report(model).head
    stored = tensors(model)
    assert head.num_bytes == sum(stored[name].nbytes for name in head_names(model).values())
    assert head.kv_bytes_per_token == 2 * KV_ELEMENTS[variant]


@pytest.mark.parametrize("variant", ["llama", "qwen2"])
def test_a_trunk_without_published_heads_is_sent_to_graft(tiny: Tiny, variant: str) -> None:
    result = report(tiny(variant))
    assert result.family is None
    assert result.head.state == "absent"
    assert any("headstart graft" in warning for warning in result.warnings)


def test_sizes_that_the_config_does_not_name_are_not_called_nought(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a GPT-2, whose layers are n_layer."""

    def rename(fields: dict[str, Any]) -> None:
        fields |= {"model_type": "gpt2", "n_layer": fields.pop("num_hidden_layers")}

    model = edited(tiny("llama"), tmp_path / "model", change_config=rename)
    found = report(model)
    show(found, {})
    printed = " ".join(capsys.readouterr().out.split())
    hidden = config(model)["hidden_size"]
    assert "layers" not in printed and f"trunk hidden {hidden}, vocabulary" in printed
    trunk = found.as_json()["trunk"]
    assert trunk["layers"] is None and trunk["hidden_size"] == hidden


@pytest.mark.parametrize("variant", one_of_each(2, WITH_HEAD))
def test_a_tensor_of_another_shape_is_reported(tiny: Tiny, tmp_path: Path, variant: str) -> None:
    model = tiny(variant)
    name = published(model, "modules.0.fuse")

    def change(contents: dict[str, torch.Tensor]) -> None:
        contents[name] = contents[name][:, :-1].contiguous()

    assert warned(edited(model, tmp_path / "model", change=change), f"{name} has shape")


@pytest.mark.parametrize("variant", one_of_each(2, WITH_HEAD, first=1))
def test_an_unknown_tensor_in_the_head_is_reported(
    tiny: Tiny, tmp_path: Path, variant: str
) -> None:
    model = tiny(variant)
    beside = published(model, "modules.0.block.").rsplit(".", 1)[0]

    def change(contents: dict[str, torch.Tensor]) -> None:
        contents[f"{beside}.surprise"] = torch.zeros(3)

    broken = edited(model, tmp_path / "model", change=change)
    assert warned(broken, f"{beside}.surprise")
    assert report(broken).head.missing == ()


def test_a_scale_beside_an_unquantised_weight_is_reported(tiny: Tiny, tmp_path: Path) -> None:
    name = published(tiny("deepseek_v3"), "o_proj")

    def change(contents: dict[str, torch.Tensor]) -> None:
        contents[f"{name}_scale_inv"] = torch.ones(2, 2)

    broken = edited(tiny("deepseek_v3"), tmp_path / "model", change=change)
    assert warned(broken, "beside weights that are not quantised")


def test_an_fp8_weight_without_a_scale_makes_the_head_partial(tiny: Tiny, tmp_path: Path) -> None:
    name = published(tiny("deepseek_v3"), "o_proj")

    def change(contents: dict[str, torch.Tensor]) -> None:
        contents[name] = contents[name].to(torch.float8_e4m3fn)

    broken = edited(tiny("deepseek_v3"), tmp_path / "model", change=change)
    assert report(broken).head.state == "partial"
    assert report(broken).head.missing == (f"{name}_scale_inv",)


@pytest.mark.parametrize("variant", ["deepseek_v3", "qwen3_5", "glm5_next"])
def test_a_head_in_a_file_that_the_index_does_not_list_is_reported(
    tiny: Tiny, tmp_path: Path, variant: str
) -> None:
    model = tiny(variant)
    names = set(head_names(model).values())
    broken = edited(model, tmp_path / "model", change=without(list(names)))
    stored = tensors(model)
    save_file({name: stored[name] for name in names}, broken / "model_mtp.safetensors")
    listed = {name: "model.safetensors" for name in stored if name not in names}
    document = {"metadata": {}, "weight_map": listed}
    (broken / "model.safetensors.index.json").write_text(json.dumps(document))
    found = report(broken)
    assert found.head.state == "complete"
    assert found.as_json()["head"]["outside_index"] == ["model_mtp.safetensors"]
    assert warned(broken, "model_mtp.safetensors, which the index does not list")
    built = build("vllm", found, LaunchOptions(), NEWEST["vllm"])
    assert any("model_mtp.safetensors" in text for text in built.warnings)
    mended = stitch(broken, broken, tmp_path / "mended")
    assert report(mended).head.outside == () and differing(stored, tensors(mended)) == set()


def test_a_total_that_does_not_agree_with_the_files_is_reported(tiny: Tiny, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(tiny("mimo", shard_bytes=300_000), broken)
    path = broken / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] -= 2
    path.write_text(json.dumps(index))
    assert warned(broken, "total_size")


def test_a_dspark_drafter_is_not_a_head(tiny: Tiny, tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["dspark_block_size"] = 4

    model = edited(tiny("deepseek_v4"), tmp_path / "model", change_config=change)
    result = report(model)
    assert (result.head.state, result.head.tensors) == ("absent", 0)
    assert [w for w in result.warnings if "DSpark" in w]
    assert not [w for w in result.warnings if "headstart restore" in w]
    with pytest.raises(HeadNotFound, match="DSpark"):
        require_head(Checkpoint.open(model))
    with pytest.raises(CheckpointError, match="DSpark"):
        stitch(tiny("deepseek_v4"), model, tmp_path / "result")


@pytest.mark.parametrize("variant", one_of_each(2, DECLARED, first=1))
def test_a_count_that_the_tensors_do_not_bear_out_is_reported(
    tiny: Tiny, tmp_path: Path, variant: str
) -> None:
    stored = MODULES.get(variant, 1)
    model = edited(tiny(variant), tmp_path / "model", change_config=set_count(stored + 1))
    assert warned(model, f"declares {stored + 1} modules, the tensors hold {stored}")


@pytest.mark.parametrize("variant", ["nemotron_h", "hy_v4"])
def test_one_module_that_is_counted_twice_is_still_whole(
    tiny: Tiny, tmp_path: Path, variant: str
) -> None:
    """Exporters once wrote the number of uses; vLLM reads one less for Hunyuan 4."""
    model = edited(tiny(variant), tmp_path / "model", change_config=set_count(2))
    assert (report(model).head.missing, report(model).head.state) == ((), "complete")


@pytest.mark.parametrize("variant", ["deepseek_v3", "qwen3_5_moe", "mimo", "nemotron_h"])
@pytest.mark.parametrize(
    "method", ["compressed-tensors", "fp8", "awq", "gptq", "modelopt", "quark"]
)
def test_an_unquantised_head_that_no_list_excludes_is_reported(
    tiny: Tiny, tmp_path: Path, variant: str, method: str
) -> None:
    def change(document: dict[str, Any]) -> None:
        document["quantization_config"] = {"quant_method": method}

    model = edited(tiny(variant), tmp_path / "model", change_config=change)
    assert warned(model, "does not exclude the head's modules")


def packed_head(model: Path, out: Path, parameter: str, quantization: dict[str, Any]) -> Path:
    """`model` with one head weight packed into a tensor of another name."""
    name = published(model, "o_proj")

    def change(contents: dict[str, torch.Tensor]) -> None:
        rows, columns = contents.pop(name).shape
        stem = name.removesuffix("weight")
        contents[stem + parameter] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
        contents[f"{stem}weight_scale"] = torch.ones(rows, columns // 16)

    def change_config(document: dict[str, Any]) -> None:
        document["quantization_config"] = quantization

    return edited(model, out, change=change, change_config=change_config)


@pytest.mark.parametrize(
    ("parameter", "quantization"),
    [
        ("qweight", {"quant_method": "gptq", "bits": 4}),
        ("qweight", {"quant_method": "awq", "bits": 4}),
        (
            "weight_packed",
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
        ),
        ("weight_packed", {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
        ("weight", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    ],
    ids=["gptq", "awq", "groups", "format", "modelopt"],
)
def test_a_four_bit_head_is_reported(
    tiny: Tiny, tmp_path: Path, parameter: str, quantization: dict[str, Any]
) -> None:
    model = packed_head(tiny("mimo"), tmp_path / "model", parameter, quantization)
    assert warned(model, "1 head weight with four bits")
    assert report(model).head.missing == ()


@pytest.mark.parametrize(
    ("parameter", "quantization"),
    [
        ("qweight", {"quant_method": "gptq", "bits": 8}),
        ("qweight", {"quant_method": "awq", "bits": 8}),
        (
            "weight_packed",
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}},
            },
        ),
        ("qweight", {"quant_method": "gptq", "bits": "4?", "config_groups": [1]}),
    ],
    ids=["gptq", "awq", "groups", "unknown"],
)
def test_eight_bits_are_not_called_four(
    tiny: Tiny, tmp_path: Path, parameter: str, quantization: dict[str, Any]
) -> None:
    model = packed_head(tiny("mimo"), tmp_path / "model", parameter, quantization)
    assert not warned(model, "four bits")


def test_a_family_given_by_hand_does_not_make_a_head_lost(tiny: Tiny) -> None:
    warnings = inspect(Checkpoint.open(tiny("llama")), "mimo").warnings
    assert any("headstart graft" in warning for warning in warnings)
    assert not any("restore" in warning for warning in warnings)


def test_suggested_commands_can_be_pasted_whatever_the_folder_is_called(
    tiny: Tiny, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny("deepseek_v3", with_head=False), tmp_path / "my $model's")
    command = f"headstart restore {shlex.quote(str(folder))} --from"
    assert warned(folder, command)
    with pytest.raises(HeadNotFound, match=re.escape(command)):
        require_head(Checkpoint.open(folder))


@pytest.mark.parametrize("variant", ["mimo", "qwen3_5", "deepseek_v4"])
def test_norms_that_are_not_numbers_are_reported(tiny: Tiny, tmp_path: Path, variant: str) -> None:
    model = tiny(variant)
    name = published(model, "0.embed_norm")

    def change(contents: dict[str, torch.Tensor]) -> None:
        contents[name][3] = float("nan")

    assert warned(edited(model, tmp_path / "model", change=change), f"{name} holds values")


@pytest.mark.parametrize("variant", ["mimo", "deepseek_v3", "qwen3_5", "step3p5"])
def test_norms_in_the_style_of_another_family_are_reported(
    tiny: Tiny, tmp_path: Path, variant: str
) -> None:
    model = tiny(variant)
    name = published(model, "0.hidden_norm")
    shift = 1 if variant in ("qwen3_5", "step3p5") else -1

    def change(contents: dict[str, torch.Tensor]) -> None:
        contents[name] += shift

    assert warned(edited(model, tmp_path / "model", change=change), f"{name} has mean")


def test_a_blanked_quantisation_config_is_reported(tiny: Tiny, tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["quantization_config"] = ""

    model = edited(tiny("mimo"), tmp_path / "model", change_config=change)
    assert warned(model, 'quantization_config is ""')


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"min_p": 0.1}, "min_p 0.1"), ({"repetition_penalty": 1.1}, "repetition_penalty 1.1")],
    ids=["min_p", "repetition_penalty"],
)
def test_generation_settings_that_engines_refuse_while_speculating_are_reported(
    tiny: Tiny, tmp_path: Path, settings: dict[str, float], word: str
) -> None:
    files = {"generation_config.json": settings}
    assert warned(edited(tiny("mimo"), tmp_path / "model", files=files), word)


@pytest.mark.parametrize("variant", ["deepseek_v3", "qwen3_5_moe", "mimo_v2"])
def test_the_json_of_inspect_has_the_agreed_keys(
    tiny: Tiny, variant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headstart.cli.main import app

    model = tiny(variant)
    monkeypatch.setattr(sys, "argv", ["headstart", "inspect", str(model), "--json"])
    with pytest.raises(SystemExit) as leaving:
        app()
    assert leaving.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["family"] == report(model).family.name
    assert document["model_type"] == config(model)["model_type"]
    assert document["architectures"] == config(model)["architectures"]
    assert document["trunk"]["hidden_size"] == 256
    assert document["generation"] == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert isinstance(document["warnings"], list)
    keys = ("state", "modules", "tensors", "missing", "bytes", "dtype", "shares")
    assert set(keys) < set(document["head"])
    assert document["head"]["kv_bytes_per_token"] > 0
    for engine in ("headstart", "vllm", "sglang", "trtllm", "xllm"):
        answer = document["engines"][engine]
        assert answer["command"] or answer["reason"]
    assert str(model) in document["engines"]["vllm"]["command"]


def test_code_that_a_config_names_is_told_and_not_trusted(tiny: Tiny, tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "someone/else--configuration_mimo.MiMoConfig"}
    changed = partial(dict.update, auto_map=auto_map)
    model = edited(tiny("mimo"), tmp_path / "model", change_config=changed)
    shown = headstart("inspect", str(model))
    assert "configuration_mimo.py of the hub's someone/else" in shown.stdout
    commands = [line for line in shown.stdout.splitlines() if "warning:" not in line]
    assert "vllm serve" in shown.stdout and not any("trust" in line for line in commands)
    assert "vLLM, SGLang cannot read" in " ".join(shown.stdout.split())
    document = json.loads(headstart("inspect", str(model), "--json").stdout)
    for engine in ("vllm", "sglang"):
        answer = document["engines"][engine]
        assert "trust" not in answer["command"]
        assert any("someone/else" in text for text in answer["warnings"])


def test_a_head_with_a_dense_block_beside_a_trunk_of_experts_is_complete(
    tiny: Tiny, tmp_path: Path
) -> None:
    found = report(with_dense_head(tiny("deepseek_v3"), tmp_path / "joyai"))
    assert found.head.state == "complete"
    assert found.head.missing == ()
    assert not any("not known" in w or "shape" in w for w in found.warnings)


def test_a_dense_head_that_lacks_a_tensor_is_partial(tiny: Tiny, tmp_path: Path) -> None:
    name = "model.layers.3.mlp.up_proj.weight"
    whole = with_dense_head(tiny("deepseek_v3"), tmp_path / "joyai")
    model = edited(whole, tmp_path / "partial", change=without([name]))
    found = find_head(Checkpoint.open(model))
    assert found.state == "partial"
    assert found.missing == (name,)


def test_a_head_that_lost_its_experts_is_not_taken_for_a_dense_one(
    tiny: Tiny, tmp_path: Path
) -> None:
    lost = [n for n in tensors(tiny("deepseek_v3")) if n.startswith("model.layers.3.mlp.")]
    model = edited(tiny("deepseek_v3"), tmp_path / "lost", change=without(lost))
    found = find_head(Checkpoint.open(model))
    assert found.state == "partial"
    assert set(found.missing) == set(lost)


def test_a_dense_matrix_among_experts_is_unexpected(tiny: Tiny, tmp_path: Path) -> None:
    name = "model.layers.3.mlp.up_proj.weight"

    def change(contents: dict[str, torch.Tensor]) -> None:
        contents[name] = contents["model.layers.0.mlp.up_proj.weight"].clone()

    found = find_head(Checkpoint.open(edited(tiny("deepseek_v3"), tmp_path / "m", change=change)))
    assert found.state == "complete"
    assert found.unexpected == (name,)
