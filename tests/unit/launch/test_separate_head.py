"""A head given with --head is opened and compared with the model and the engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.launch_examples import command, report

from headstart.calibrate.tiny import write_tiny
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import LaunchError, MissingTensor
from headstart.heads.export import plan_export
from headstart.heads.head import head_of
from headstart.heads.inspection import Report, inspect
from headstart.launch import EngineCommand, LaunchOptions, build
from headstart.launch.versions import NEWEST


def inspected(folder: Path) -> Report:
    return inspect(Checkpoint.open(folder))


def exported(model: Path, form: str, out: Path) -> Path:
    plan_export(head_of(Checkpoint.open(model)), form).write(out)
    return out


def launched(engine: str, model: Path, head: Path) -> EngineCommand:
    return build(engine, inspected(model), LaunchOptions(head=head), NEWEST[engine])


@pytest.mark.parametrize(
    ("engine", "form"),
    [("vllm", ""), ("sglang", ""), ("sglang", "sglang"), ("xllm", "xllm")],
)
def test_an_engine_takes_what_it_reads(tiny: Any, tmp_path: Path, engine: str, form: str) -> None:
    model = tiny("deepseek_v3")
    head = exported(model, form, tmp_path / "head") if form else model
    built = launched(engine, model, head)
    assert str(head) in built.shell()
    assert not any("does not exist" in text for text in built.warnings)
    assert "head weights" in built.memory[0] and "the size of" not in built.memory[0]


@pytest.mark.parametrize(
    ("engine", "form", "advice"),
    [
        ("vllm", "sglang", "headstart stitch {head} {model} --out DIR"),
        ("vllm", "headstart", "headstart stitch {head} {model} --out DIR"),
        ("vllm", "xllm", "headstart stitch {head} {model} --out DIR"),
        ("trtllm", "xllm", "headstart stitch {head} {model} --out DIR"),
        ("sglang", "xllm", "headstart convert {head} --to sglang --out DIR"),
        ("sglang", "speculators", "headstart convert {head} --to sglang --out DIR"),
        ("xllm", "sglang", "headstart convert {head} --to xllm --out DIR"),
        ("xllm", "", "headstart export {head} --format xllm --out DIR"),
    ],
)
def test_another_format_is_refused_with_the_command_that_makes_the_right_one(
    tiny: Any, tmp_path: Path, engine: str, form: str, advice: str
) -> None:
    model = tiny("deepseek_v3")
    head = exported(model, form, tmp_path / "head") if form else model
    with pytest.raises(LaunchError) as refusal:
        launched(engine, model, head)
    assert advice.format(head=head, model=model) in str(refusal.value)


def test_tensorrt_llm_takes_what_was_exported_for_it(tiny: Any, tmp_path: Path) -> None:
    model = tiny("nemotron_h")
    head = exported(model, "trtllm", tmp_path / "head")
    built = launched("trtllm", model, head)
    assert f"speculative_model: '{head}'" in "".join(built.files.values())


def test_a_head_of_another_family_is_refused_with_both(tiny: Any) -> None:
    with pytest.raises(LaunchError, match=r"\(mimo\).*\(deepseek_v3\)\. Give a head"):
        launched("vllm", tiny("deepseek_v3"), tiny("mimo"))


def test_a_head_of_another_hidden_size_is_refused_with_both(tiny: Any) -> None:
    model = tiny("deepseek_v3")
    options = LaunchOptions(head=model)
    with pytest.raises(LaunchError, match=r"hidden size 256, and .* has 7168"):
        build("vllm", report("deepseek_v3"), options, NEWEST["vllm"])


def test_a_head_that_lacks_tensors_is_not_launched(tiny: Any, tmp_path: Path) -> None:
    head = exported(tiny("deepseek_v3"), "headstart", tmp_path / "head")
    import safetensors.torch as files

    for file in head.glob("*.safetensors"):
        tensors = files.load_file(file)
        tensors.pop(next(name for name in tensors if "fuse" in name))
        files.save_file(tensors, file)
    with pytest.raises(MissingTensor, match="fuse"):
        launched("sglang", tiny("deepseek_v3"), head)


def test_a_path_that_is_not_here_is_a_warning() -> None:
    built = command("sglang", head=Path("/heads/h"))
    assert any("/heads/h does not exist here" in text for text in built.warnings)
    assert "the size of /heads/h" in built.memory[0]


def test_memory_counts_the_separate_head(tiny: Any, tmp_path: Path) -> None:
    model = tiny("deepseek_v3")
    head = exported(model, "sglang", tmp_path / "head")
    line = launched("sglang", model, head).memory[0]
    assert str(head) in line and "head weights 1.8 MiB" in line


def test_sglang_is_told_about_a_plain_separate_head_of_a_quantised_model(
    tiny: Any, tmp_path: Path
) -> None:
    model = tiny("deepseek_v3")
    head = exported(model, "sglang", tmp_path / "head")
    found = inspected(model)
    bare = replace(found.head, is_quantized=True)  # the model's own head is not what drafts
    found = replace(found, trunk=replace(found.trunk, quantization="fp8"), head=bare)
    built = build("sglang", found, LaunchOptions(head=head), NEWEST["sglang"])
    assert "--speculative-draft-model-quantization" in built.argv


def test_a_separate_head_stands_in_for_one_that_is_missing(tiny: Any, tmp_path: Path) -> None:
    model = tiny("mimo")
    head = exported(model, "sglang", tmp_path / "head")
    bare = tmp_path / "bare"
    write_tiny("mimo", bare)
    import safetensors.torch as files

    for file in bare.glob("*.safetensors"):
        tensors = {n: t for n, t in files.load_file(file).items() if "mtp_layers" not in n}
        files.save_file(tensors, file)
    assert inspected(bare).head.state == "declared-but-missing"
    assert str(head) in launched("sglang", bare, head).argv


def write_assistant(folder: Path) -> Path:
    import safetensors.torch as files
    import torch

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma4_assistant"}))
    files.save_file({"pre_projection.weight": torch.zeros(4, 4)}, folder / "model.safetensors")
    return folder


def test_a_gemma_4_model_is_served_with_its_assistant_as_head(tmp_path: Path) -> None:
    assistant = write_assistant(tmp_path / "assistant")
    target = report("", state="absent", model_type="gemma4")
    built = build("vllm", target, LaunchOptions(head=assistant), NEWEST["vllm"])
    assert json.loads(built.argv[built.argv.index("--speculative-config") + 1]) == {
        "method": "mtp",
        "model": str(assistant),
        "num_speculative_tokens": 1,
    }


def test_an_assistant_drafts_for_gemma_4_only(tmp_path: Path) -> None:
    assistant = write_assistant(tmp_path / "assistant")
    with pytest.raises(LaunchError, match="Give it to a Gemma 4 model"):
        command("vllm", head=assistant)
