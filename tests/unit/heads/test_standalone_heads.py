"""Standalone heads: told from models, read from any tool, and refused when they are damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_fixture import Tiny

from headstart.checkpoint.reader import Checkpoint
from headstart.cli import convert as convert_command
from headstart.cli import export as export_command
from headstart.cli import graft as graft_command
from headstart.cli import inspect as inspect_command
from headstart.cli import restore as restore_command
from headstart.cli import stitch as stitch_command
from headstart.cli.options import Writing
from headstart.errors import (
    BadConfig,
    CheckpointError,
    ConfigError,
    MissingTensor,
    ShapeMismatch,
    UnexpectedTensor,
)
from headstart.heads.export import plan_convert, plan_export
from headstart.heads.formats import FORMATS, format_of, open_head, open_model
from headstart.heads.inspection import inspect

Exported = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def exported(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """`exported("mimo", "xllm")`: the folder of that head, made once and never changed."""
    folder = tmp_path_factory.mktemp("heads")

    def get(variant: str, form: str) -> Path:
        out = folder / f"{variant}-{form}"
        if not out.exists():
            plan_export(open_head(tiny(variant)), form).write(out)
        return out

    return get


def changed(
    head: Path,
    out: Path,
    *,
    tensors: Callable[[dict[str, torch.Tensor]], Any] = lambda tensors: None,
    config: Callable[[dict[str, Any]], Any] = lambda config: None,
    made: Callable[[dict[str, Any]], Any] = lambda made: None,
) -> Path:
    """A copy of a one-file head with other tensors, another config or another headstart.json."""
    shutil.copytree(head, out)
    file = next(out.glob("*.safetensors"))
    contents = load_file(file)
    tensors(contents)
    save_file(contents, file)
    (out / "model.safetensors.index.json").unlink(missing_ok=True)
    for name, change in (("config.json", config), ("headstart.json", made)):
        document = read(out, name)
        change(document)
        (out / name).write_text(json.dumps(document))
    return out


def read(folder: Path, name: str = "config.json") -> dict[str, Any]:
    document = json.loads((folder / name).read_text())
    assert isinstance(document, dict)
    return document


def foreign(head: Path, out: Path) -> Path:
    """The head as the engine's own script would have written it."""
    shutil.copytree(head, out)
    (out / "headstart.json").unlink()
    return out


# Heads that xLLM's own script wrote.


@pytest.mark.parametrize("form", ["sglang", "speculators", "headstart"])
@pytest.mark.parametrize("variant", ["glm4_moe", "qwen3_5_moe", "mimo"])
def test_a_foreign_xllm_head_converts_to_a_config_that_engines_know(
    tiny: Tiny, exported: Exported, tmp_path: Path, variant: str, form: str
) -> None:
    head = open_head(foreign(exported(variant, "xllm"), tmp_path / "foreign"))
    operation = plan_convert(head, form)
    assert any("--model MODEL" in change for change in operation.changes)
    out = tmp_path / "out"
    operation.write(out)
    assert format_of(Checkpoint.open(out)) == form
    back = open_head(out)
    original = read(tiny(variant))
    assert back.config["model_type"] == original["model_type"]
    assert back.config["architectures"] == original["architectures"]
    assert "quantization_config" not in back.config
    stored = read(out)
    stored = stored.get("trunk_config") or stored.get("transformer_layer_config") or stored
    assert not stored["model_type"].endswith("_mtp")
    assert "quantization_config" not in stored
    assert {*back.tensors, *back.left_out} == set(head.tensors)
    assert back.lost_fields == head.lost_fields != ()


@pytest.mark.parametrize("form", ["sglang", "speculators", "headstart"])
def test_the_model_supplies_the_config_that_a_foreign_head_lost(
    tiny: Tiny, exported: Exported, tmp_path: Path, form: str
) -> None:
    model = Checkpoint.open(tiny("glm4_moe"))
    head = open_head(foreign(exported("glm4_moe", "xllm"), tmp_path / "foreign"))
    operation = plan_convert(head, form, model=model)
    assert not any("--model MODEL" in change for change in operation.changes)
    operation.write(tmp_path / "out")
    assert open_head(tmp_path / "out").config == model.config.raw


def test_a_foreign_sglang_head_is_no_longer_called_nextn(
    exported: Exported, tmp_path: Path
) -> None:
    head = open_head(foreign(exported("glm4_moe", "sglang"), tmp_path / "foreign"))
    assert head.config["architectures"] == ["Glm4MoeForCausalLM"]
    assert head.lost_fields == ("num_hidden_layers",)


def test_the_file_decides_the_format_before_the_model_type(
    exported: Exported, tmp_path: Path
) -> None:
    head = changed(
        exported("glm4_moe", "sglang"),
        tmp_path / "head",
        config=lambda config: config.update(model_type="glm4_moe_mtp"),
    )
    assert format_of(Checkpoint.open(head)) == "sglang"


# Heads where a model belongs.


@pytest.mark.parametrize("form", FORMATS)
def test_a_head_is_not_opened_as_a_model(exported: Exported, form: str) -> None:
    with pytest.raises(CheckpointError, match=f"standalone {form} head, not a model. Give the"):
        open_model(exported("mimo", form))


@pytest.mark.parametrize("form", FORMATS)
def test_no_command_takes_a_head_for_a_model(
    tiny: Tiny, exported: Exported, tmp_path: Path, form: str
) -> None:
    head, model, out = str(exported("mimo", form)), str(tiny("mimo")), tmp_path / "out"
    writing = Writing(out=out)
    refused = pytest.raises(CheckpointError, match="not a model")
    with refused:
        restore_command.run(model=head, original=model, writing=writing)
    with refused:
        stitch_command.run(head=model, model=head, writing=writing)
    with refused:
        graft_command.run(model=head, writing=writing)
    with refused:
        convert_command.run(head=head, to="headstart", model=head, writing=writing)
    with pytest.raises(CheckpointError, match="headstart convert"):
        export_command.run(model=head, writing=writing)
    assert not out.exists()


@pytest.mark.parametrize("form", FORMATS)
def test_inspect_says_what_a_standalone_head_is(
    tiny: Tiny, exported: Exported, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = exported("deepseek_v3", form)
    head = open_head(folder)
    inspect_command.run(model=str(folder), json_output=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["format"], document["family"]) == (form, "deepseek_v3")
    assert document["head"]["modules"] == 1
    assert document["head"]["tensors"] == len(head.tensors)
    assert document["head"]["bytes"] == head.num_bytes
    assert document["head"]["dtype"] == "BF16"
    assert document["engines"] == {}
    model = inspect(Checkpoint.open(tiny("deepseek_v3"))).as_json()
    assert model["format"] is None
    assert set(document) == {*model, "engines"}
    assert set(document["head"]) == set(model["head"])


def test_inspect_shows_a_standalone_head_to_people(
    exported: Exported, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect_command.run(model=str(exported("mimo", "xllm")))
    shown = capsys.readouterr().out
    assert "standalone xllm head" in shown
    assert "1 module," in shown
    assert "vllm serve" not in shown


# Damaged heads.


@pytest.mark.parametrize("modules", [0, -1, 65, 10**9, True, "1", None])
def test_a_number_of_modules_that_cannot_be_is_refused(
    exported: Exported, tmp_path: Path, modules: Any
) -> None:
    head = changed(
        exported("mimo", "headstart"),
        tmp_path / "head",
        config=lambda config: config.update(modules=modules),
    )
    with pytest.raises(BadConfig, match=r"modules is .*; expected a whole number from 1 to 64"):
        open_head(head)


def test_more_modules_than_the_tensors_have_are_refused(exported: Exported, tmp_path: Path) -> None:
    head = changed(
        exported("mimo", "headstart"),
        tmp_path / "head",
        config=lambda config: config.update(modules=2),
    )
    with pytest.raises(MissingTensor, match=r"2 module\(s\), but 1 hold a fuse tensor"):
        open_head(head)


@pytest.mark.parametrize("name", ["modules.x", "modules.0", "modules.x.fuse.weight", "shared.a"])
def test_a_name_that_is_not_one_of_ours_is_refused(
    exported: Exported, tmp_path: Path, name: str
) -> None:
    head = changed(
        exported("mimo", "headstart"),
        tmp_path / "head",
        tensors=lambda tensors: tensors.update({name: torch.zeros(2)}),
    )
    with pytest.raises(UnexpectedTensor, match=name.replace(".", r"\.")):
        open_head(head)


@pytest.mark.parametrize("form", ["xllm", "speculators"])
def test_a_role_that_a_format_has_no_place_for_is_refused(
    exported: Exported, tmp_path: Path, form: str
) -> None:
    head = changed(
        exported("deepseek_v3", "headstart"),
        tmp_path / "head",
        tensors=lambda tensors: tensors.update({"modules.0.odd.weight": torch.zeros(2)}),
    )
    with pytest.raises(UnexpectedTensor, match=r"modules\.0\.odd\.weight"):
        plan_convert(open_head(head), form)


def test_a_speculators_head_without_fusion_matrix_is_refused(
    exported: Exported, tmp_path: Path
) -> None:
    head = changed(
        exported("mimo", "speculators"),
        tmp_path / "head",
        tensors=lambda tensors: tensors.pop("mtp_layers.0.input_proj.weight"),
    )
    with pytest.raises(MissingTensor, match=r"lacks mtp_layers\.0\.input_proj\.weight"):
        open_head(head)


@pytest.mark.parametrize("shape", [(8,), (4, 3), (2, 2, 2)])
def test_a_fusion_matrix_that_is_none_is_refused(
    exported: Exported, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    head = changed(
        exported("mimo", "speculators"),
        tmp_path / "head",
        tensors=lambda t: t.update({"mtp_layers.0.input_proj.weight": torch.zeros(shape)}),
    )
    with pytest.raises(ShapeMismatch, match=r"expected \[rows, 2 x hidden size\]"):
        open_head(head)


@pytest.mark.parametrize("shape", [(8,), (4, 4), (2, 3, 2), (0, 2, 2)])
def test_fused_experts_of_another_form_are_refused(
    exported: Exported, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    name = "mtp_layers.0.mlp.experts.gate_up_proj"
    head = changed(
        exported("deepseek_v3", "speculators"),
        tmp_path / "head",
        tensors=lambda tensors: tensors.update({name: torch.zeros(shape)}),
    )
    with pytest.raises(ShapeMismatch, match=r"gate_up_proj has shape .*; expected \[experts"):
        open_head(head)


@pytest.mark.parametrize(
    "odd",
    [torch.zeros(4, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.bfloat16)],
    ids=["one axis", "another shape"],
)
@pytest.mark.parametrize("expert", [0, 1])
def test_an_expert_unlike_its_siblings_is_refused(
    exported: Exported, tmp_path: Path, expert: int, odd: torch.Tensor
) -> None:
    name = f"modules.0.block.mlp.experts.{expert}.up_proj.weight"
    head = changed(
        exported("deepseek_v3", "headstart"),
        tmp_path / "head",
        tensors=lambda tensors: tensors.update({name: odd}),
    )
    with pytest.raises(ShapeMismatch, match="expected matrices of one shape and dtype"):
        plan_convert(open_head(head), "speculators")


def test_an_expert_with_a_huge_number_is_refused_at_once(
    exported: Exported, tmp_path: Path
) -> None:
    name = "modules.0.block.mlp.experts.999999999.up_proj.weight"
    head = changed(
        exported("deepseek_v3", "headstart"),
        tmp_path / "head",
        tensors=lambda tensors: tensors.update({name: torch.zeros(2, 2)}),
    )
    with pytest.raises(MissingTensor, match="expected experts 0 to 999999999"):
        plan_convert(open_head(head), "speculators")


# headstart.json and nested configs.


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("family", 3), ("trunk_config", [1]), ("root", {}), ("left_out", "abc"), ("left_out", [1]),
        ("left_out", ["lm_head"]), ("left_out", ["modules.x.y.z"]), ("experts", []),
        ("lost_fields", "x"), ("trunk_config", {"n_routed_experts": 10**9}),
    ],
)  # fmt: skip
def test_a_field_of_headstart_json_of_the_wrong_type_is_refused(
    exported: Exported, tmp_path: Path, form: str, field: str, value: Any
) -> None:
    head = changed(
        exported("deepseek_v3", form),
        tmp_path / "head",
        made=lambda made: made.update({field: value}),
    )
    with pytest.raises(BadConfig, match=rf"headstart\.json: {field}.* is .*; expected"):
        open_head(head)


@pytest.mark.parametrize("form", ["xllm", "speculators"])
def test_a_root_that_the_family_does_not_have_is_refused(
    exported: Exported, tmp_path: Path, form: str
) -> None:
    head = changed(
        exported("deepseek_v3", form), tmp_path / "head", made=lambda made: made.update(root="\0.")
    )
    with pytest.raises(BadConfig, match="root is"):
        open_head(head)


@pytest.mark.parametrize(
    ("form", "part"),
    [("headstart", "trunk_config"), ("speculators", "transformer_layer_config")],
)
@pytest.mark.parametrize("field", ["n_routed_experts", "mtp_num_experts", "hidden_size"])
def test_a_nested_config_is_checked_like_a_whole_one(
    exported: Exported, tmp_path: Path, form: str, part: str, field: str
) -> None:
    head = changed(
        exported("deepseek_v3", form),
        tmp_path / "head",
        config=lambda config: config[part].update({field: 10**12}),
    )
    with pytest.raises(BadConfig, match=rf"{part}\.{field} is 1000000000000; expected"):
        open_head(head)


def test_a_speculators_head_names_its_model_as_far_as_it_is_known(
    tiny: Tiny, tmp_path: Path
) -> None:
    def verifier(folder: Path) -> str | None:
        config = json.loads((folder / "config.json").read_text())
        found: str | None = config["speculators_config"]["verifier"]["name_or_path"]
        return found

    model, other = tiny("mimo"), tiny("mimo", seed=1)
    plan_export(open_head(model), "speculators").write(tmp_path / "direct")
    plan_export(open_head(model), "headstart").write(tmp_path / "head")
    plan_convert(open_head(tmp_path / "head"), "sglang").write(tmp_path / "sglang")
    for source in ("head", "sglang"):
        plan_convert(open_head(tmp_path / source), "speculators").write(tmp_path / f"by-{source}")
    given = plan_convert(open_head(tmp_path / "head"), "speculators", model=Checkpoint.open(other))
    given.write(tmp_path / "given")
    names = [verifier(tmp_path / name) for name in ("direct", "by-head", "by-sglang", "given")]
    assert names == [str(model), str(model), str(model), str(other)]
    for folder in ("sglang", "by-head"):
        (tmp_path / folder / "headstart.json").unlink()
    plan_convert(open_head(tmp_path / "by-head"), "speculators").write(tmp_path / "again")
    assert verifier(tmp_path / "again") == str(model), "as the format itself says"
    unknown = plan_convert(open_head(tmp_path / "sglang"), "speculators")
    assert any("--model MODEL says" in change for change in unknown.changes)
    unknown.write(tmp_path / "unknown")
    assert verifier(tmp_path / "unknown") is None


def test_a_model_is_not_its_own_original(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model itself; give the original"):
        writing = Writing(out=tmp_path / "x")
        restore_command.run(model=str(tiny("mimo")), original=str(tiny("mimo")), writing=writing)
