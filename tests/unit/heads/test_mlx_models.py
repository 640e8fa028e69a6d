"""Heads in models that MLX converted: put in, taken out, kept as they are quantised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.head_edits import differing, tensors
from support.tiny_fixture import Tiny

from headstart.errors import (
    BadConfig,
    CheckpointError,
    ConfigError,
    MissingTensor,
    UnsupportedFamily,
)
from headstart.heads.export import plan_export
from headstart.heads.formats import open_any, open_head
from headstart.heads.inspection import inspect
from headstart.heads.stitch import plan_restore, plan_stitch

FILES = {
    "sidecar": "mtp.safetensors", "vllm-mlx": "mtp/weights.safetensors",
    "embedded": "model-mtp.safetensors",
}  # fmt: skip


@pytest.fixture
def bare(tiny: Tiny, tmp_path: Path) -> Path:
    """A model as mlx-lm leaves it: the head dropped, the config still declaring it."""
    return converted(tiny, tmp_path / "bare")


def converted(tiny: Tiny, out: Path, name: str = "qwen3_5_moe", **config: Any) -> Path:
    model = tiny(name, with_head=False)
    out.mkdir()
    document = {**json.loads((tiny(name) / "config.json").read_text()), **config}
    (out / "config.json").write_text(json.dumps(document))
    (out / "README.md").write_text("mine")
    save_file(tensors(model), out / "model.safetensors", metadata={"format": "mlx"})
    return out


def restored(model: Path, head: Path, out: Path, **options: Any) -> Path:
    source = open_head(head)
    plan_restore(open_any(model), source.origin, source, **options).write(out)
    return out


def head_file(folder: Path, layout: str) -> dict[str, torch.Tensor]:
    return load_file(folder / FILES[layout])


@pytest.mark.parametrize("layout", FILES)
def test_a_lost_head_is_given_back_and_the_trunk_stays(
    layout: str, bare: Path, tiny: Tiny, tmp_path: Path
) -> None:
    original = tiny("qwen3_5_moe")
    assert inspect(open_any(bare)).head.state == "declared-but-missing"
    out = restored(bare, original, tmp_path / "out", mlx_layout=layout)
    assert (out / "model.safetensors").read_bytes() == (bare / "model.safetensors").read_bytes()
    assert (out / "README.md").read_text() == "mine"
    drafter = export_mlx(original, tmp_path / "drafter")
    expected = {f"mtp.{name}": value for name, value in tensors(drafter).items()}
    assert differing(head_file(out, layout), expected) == set()
    report = inspect(open_any(out))
    assert (report.head.state, report.format) == ("complete", "mlx")
    assert FILES[layout] in report.facts["head in"] and "norms 1 + w" in report.facts["head in"]
    back = restore_published(out, tiny, tmp_path / "again")
    changed = differing(back, tensors(original))
    assert changed and all("norm" in name for name in changed)


def restore_published(folder: Path, tiny: Tiny, out: Path) -> dict[str, torch.Tensor]:
    model = open_any(tiny("qwen3_5_moe", with_head=False))
    source = open_head(folder)
    plan_restore(model, source.origin, source).write(out)
    return tensors(out)


def export_mlx(model: Path, out: Path, **options: Any) -> Path:
    plan_export(open_head(model), "mlx", **options).write(out)
    return out


def test_an_embedded_head_is_listed_and_the_trap_is_said(
    bare: Path, tiny: Tiny, tmp_path: Path
) -> None:
    head = open_head(tiny("qwen3_5_moe"))
    operation = plan_stitch(head, open_any(bare), mlx_layout="embedded")
    assert "mlx-lm 0.30.7 to 0.31.3" in operation.changes[-1]
    operation.write(tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["mtp.fc.weight"] == "model-mtp.safetensors"
    assert set(index["weight_map"]) == set(tensors(tmp_path / "out"))
    assert "adds 1 to all its norms again" in " ".join(inspect(open_any(tmp_path / "out")).warnings)
    # put elsewhere, mlx-lm does not see it: nothing to warn of
    for layout in ("sidecar", "vllm-mlx"):
        operation = plan_stitch(head, open_any(bare), mlx_layout=layout)
        assert not any("mlx-lm" in change for change in operation.changes)
    moved = plan_stitch(open_head(tmp_path / "out"), open_any(tmp_path / "out"))
    moved.write(tmp_path / "moved")
    assert not (tmp_path / "moved" / "model-mtp.safetensors").exists()
    assert inspect(open_any(tmp_path / "moved")).warnings == ()
    listed = json.loads((tmp_path / "moved" / "model.safetensors.index.json").read_text())
    assert not any("mtp" in name for name in listed["weight_map"])


def test_a_head_inside_a_shard_of_the_trunk_is_taken_out(
    bare: Path, tiny: Tiny, tmp_path: Path
) -> None:
    old = {"mtp.norm.weight": torch.ones(256, dtype=torch.bfloat16)}
    trunk = load_file(bare / "model.safetensors")
    save_file({**trunk, **old}, bare / "model.safetensors", metadata={"format": "mlx"})
    assert inspect(open_any(bare)).head.state == "partial"
    head = open_head(tiny("qwen3_5_moe"))
    plan_stitch(head, open_any(bare)).write(tmp_path / "out")
    assert differing(load_file(tmp_path / "out" / "model.safetensors"), trunk) == set()


def test_vllm_mlx_is_told_how_norms_are_and_how_many_modules(
    bare: Path, tiny: Tiny, tmp_path: Path
) -> None:
    out = restored(bare, tiny("qwen3_5_moe"), tmp_path / "out", mlx_layout="vllm-mlx")
    manifest = json.loads((out / "mtp" / "manifest.json").read_text())
    assert manifest == {"artifact_schema_version": 1, "rmsnorm_weight_format": "mlx_gamma"}
    config = json.loads((out / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    # the manifest counts, whatever the norms are around
    small = head_file(out, "vllm-mlx")
    small = {n: v * 0.1 if n.endswith("norm.weight") else v for n, v in small.items()}
    save_file(small, out / "mtp" / "weights.safetensors")
    assert "norms 1 + w" in inspect(open_any(out)).facts["head in"]
    (out / "mtp" / "manifest.json").unlink()
    assert "norms as published" in inspect(open_any(out)).facts["head in"]


QUANTIZATION = {"group_size": 32, "bits": 4, "mode": "affine"}


def test_a_quantised_head_keeps_its_bytes_from_place_to_place(tiny: Tiny, tmp_path: Path) -> None:
    model = converted(tiny, tmp_path / "model", quantization=QUANTIZATION)
    out = restored(model, tiny("qwen3_5_moe"), tmp_path / "out", head_type="q4")
    made = head_file(out, "sidecar")
    assert made["mtp.fc.weight"].dtype == torch.uint32
    assert made["mtp.fc.scales"].shape == (256, 512 // 32)  # the model's groups
    assert "mtp.layers.0.mlp.gate.scales" not in made  # a router, as mlx-vlm leaves it
    assert "mtp.layers.0.mlp.switch_mlp.up_proj.biases" in made
    drafter = export_mlx(out, tmp_path / "drafter")
    config = json.loads((drafter / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"] == QUANTIZATION
    bare_names = {name.removeprefix("mtp."): value for name, value in made.items()}
    assert differing(tensors(drafter), bare_names) == set()
    again = restored(model, drafter, tmp_path / "again", mlx_layout="embedded")
    assert differing(head_file(again, "embedded"), made) == set()
    said = open_head(drafter).changes
    assert "dequantised, not the published values" in said[0]
    values = restore_published(drafter, tiny, tmp_path / "published")["mtp.fc.weight"]
    wanted = tensors(tiny("qwen3_5_moe"))["mtp.fc.weight"]
    assert not torch.equal(values, wanted)
    assert (values.float() - wanted.float()).abs().max() < wanted.float().abs().max() / 8


def test_a_drafter_is_quantised_when_it_is_made(tiny: Tiny, tmp_path: Path) -> None:
    out = export_mlx(tiny("glm4_moe_lite"), tmp_path / "out", head_type="q8")
    made = load_file(out / "model.safetensors")
    assert made["model.eh_proj.weight"].dtype == torch.uint32
    head = open_head(out)
    assert head.tensors.keys() == open_head(tiny("glm4_moe_lite")).tensors.keys()
    with pytest.raises(ConfigError, match="the head is quantised already"):
        plan_export(head, "mlx", head_type="q4")


def test_modules_may_have_settings_of_their_own(tiny: Tiny, tmp_path: Path) -> None:
    out = export_mlx(tiny("qwen3_5"), tmp_path / "out", head_type="q8")
    config = json.loads((out / "config.json").read_text())
    config["quantization"] = {"bits": 4, "group_size": 64, "fc": {"bits": 8}}
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"_proj\.weight is U32 .* expected those of 4 bits"):
        open_head(out)
    config["quantization"] = {"bits": 8, "group_size": 64, "fc": {"mode": "mxfp8"}}
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadConfig, match=r"fc is quantised, and .* mode mxfp8"):
        open_head(out)


def test_parts_of_quantised_weights_that_are_missing_are_said(tiny: Tiny, tmp_path: Path) -> None:
    out = export_mlx(tiny("qwen3_5"), tmp_path / "out", head_type="q4")
    made = load_file(out / "model.safetensors")
    for lost, error, said in (
        ("fc.biases", UnsupportedFamily, "fc.scales without biases: .*mxfp4"),
        ("fc.weight", MissingTensor, r"holds fc\.(scales|biases) without fc\.weight"),
    ):
        kept = {name: value for name, value in made.items() if name != lost}
        save_file(kept, out / "model.safetensors", metadata={"format": "mlx"})
        with pytest.raises(error, match=said):
            open_head(out)


def test_what_cannot_be_put_in_is_said(bare: Path, tiny: Tiny, tmp_path: Path) -> None:
    head = open_head(tiny("qwen3_5_moe"))
    with pytest.raises(ConfigError, match=r"--mlx-layout is 'other'; expected one of sidecar"):
        plan_stitch(head, open_any(bare), mlx_layout="other")
    with pytest.raises(ConfigError, match="expected bf16 or one of q2, q3"):
        plan_stitch(head, open_any(bare), head_type="q8_0")
    with pytest.raises(ConfigError, match="is no model that MLX converted; drop it"):
        plan_stitch(head, open_any(tiny("qwen3_5_moe")), mlx_layout="sidecar")
    model = converted(tiny, tmp_path / "model", quantization=QUANTIZATION)
    with pytest.raises(ConfigError, match=r"as the model is quantised \(4 bits.*or give q4"):
        plan_stitch(head, open_any(model), mlx_layout="vllm-mlx", head_type="q8")
    glm = converted(tiny, tmp_path / "glm", "glm4_moe_lite")
    with pytest.raises(UnsupportedFamily, match=r"no runtime of MLX is known.*--format mlx"):
        plan_stitch(open_head(tiny("glm4_moe_lite")), open_any(glm))
    following = converted(tiny, tmp_path / "next", "qwen3_next")
    with pytest.raises(UnsupportedFamily, match=r"--mlx-layout embedded: .* expected sidecar"):
        plan_stitch(open_head(tiny("qwen3_next")), open_any(following), mlx_layout="embedded")
    whole = restored(bare, tiny("qwen3_5_moe"), tmp_path / "whole")
    with pytest.raises(CheckpointError, match="has a head; there is nothing to restore"):
        restored(whole, tiny("qwen3_5_moe"), tmp_path / "out")
