"""Causes are named for the engine, the release, the family and the checkpoint at hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.head_edits import edited
from support.launch_examples import command
from support.launch_examples import report as example
from support.tiny_fixture import Tiny

from headstart.checkpoint.reader import Checkpoint
from headstart.doctor.causes import TABLE, Case, likely_causes
from headstart.doctor.verdict import Verdict
from headstart.families.registry import families
from headstart.heads.inspection import inspect


def causes(
    engine: str | None = None, version: str | None = None, verdict: Verdict = "dead", **own: Any
) -> str:
    found = None
    if own:  # a report that was made by hand has no files to look into
        found = example(**own)
        found = replace(found, head=replace(found.head, tensors=0))
    return "\n".join(likely_causes(Case(engine, version, found, verdict)))


def test_a_fault_of_a_family_s_release_is_named_for_that_release() -> None:
    assert "final_layernorm is not loaded" in causes("sglang", "0.5.12", name="hy_v3")
    assert "final_layernorm" not in causes("sglang", "0.5.16", name="hy_v3")
    assert "final_layernorm" not in causes("vllm", "0.20.0", name="hy_v3")
    unknown = causes("sglang", None, name="hy_v3")
    assert "SGLang from 0.5.11 before 0.5.16: final_layernorm" in unknown
    assert "SGLang from 0.5.11" in causes("sglang", "0.0.0-odd", name="hy_v3")
    assert "recycled_hidden = before_out_norm" in causes("vllm", "0.23.0", name="deepseek_v3")
    assert "recycled_hidden" not in causes("vllm", "0.32.0", name="deepseek_v3")


@pytest.mark.parametrize(
    ("name", "issue"),
    [
        ("qwen4_exp", "#55357"),
        ("glm_moe_dsa", "#55605"),
        ("qwen3_5", "#46994"),
        ("deepseek_v4", "#43456"),
    ],
)
def test_what_happens_now_and_then_is_said_by_the_doctor_alone(name: str, issue: str) -> None:
    assert issue in causes("vllm", "0.32.0", name=name)
    assert issue not in causes("sglang", "0.5.23", name=name)
    assert not any(issue in text for text in command("vllm", name, "0.32.0").warnings)


def test_engines_have_causes_of_their_own() -> None:
    assert "#58080" in causes("vllm", "0.32.0") and "#58080" not in causes("sglang", "0.5.23")
    assert "llama.cpp#23476" in causes("llamacpp", "b10586")
    assert "--probe" in causes() and "--probe" in causes("headstart", "0.1.0")
    assert "launch MODEL --engine" in causes("vllm", "0.32.0", "off")
    assert causes("vllm", "0.32.0", "healthy") == ""
    assert "higher temperature" in causes(verdict="below")
    assert "higher temperature" not in causes(verdict="dead")


def test_every_cause_of_an_engine_names_where_it_was_seen() -> None:
    listed = re.compile(r"[\w.-]+/[\w.-]+#\d+(, ([\w.-]+/[\w.-]+)?#\d+)*")
    for cause in TABLE:
        assert not cause.engines or listed.fullmatch(cause.seen_in), cause.text
    for owner in families():
        for caution in owner.cautions:
            assert not caution.is_occasional or listed.search(caution.text), caution.text


def test_how_a_checkpoint_is_quantised_decides(tiny: Tiny, tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    folder = edited(tiny("mimo"), tmp_path / "a", change_config=lambda c: c.update(quantised))
    found = inspect(Checkpoint.open(folder))
    said = "\n".join(likely_causes(Case("vllm", "0.32.0", found, "dead")))
    assert "#37667" in said and "#48492" not in said
    plain = inspect(Checkpoint.open(tiny("mimo")))
    assert "#37667" not in "\n".join(likely_causes(Case("vllm", "0.32.0", plain, "dead")))


def test_what_the_files_show_comes_first(tiny: Tiny, tmp_path: Path) -> None:
    def zero(contents: dict[str, torch.Tensor]) -> None:
        contents["model.mtp_layers.0.input_proj.weight"].zero_()

    folder = edited(tiny("mimo"), tmp_path / "zeros", change=zero)
    found = inspect(Checkpoint.open(folder))
    first = likely_causes(Case("vllm", "0.32.0", found, "dead"))[0]
    assert "1 matrices of the head hold nothing but zeros (model.mtp_layers.0.input_proj" in first
    assert likely_causes(Case("vllm", "0.32.0", found, "healthy")) == []
    (folder / "headstart.json").write_text(json.dumps({"fresh": True}))
    assert "never trained" in likely_causes(Case(None, None, found, "low"))[1]

    def cut(contents: dict[str, torch.Tensor]) -> None:
        del contents["model.mtp_layers.0.mlp.up_proj.weight"]

    partial = inspect(Checkpoint.open(edited(tiny("mimo"), tmp_path / "cut", change=cut)))
    said = likely_causes(Case("vllm", "0.32.0", partial, "dead"))
    assert "partial (1 tensors missing)" in said[0] and "#35548" in said[1]
    unread = inspect(Checkpoint.open(tiny("qwen3_5_moe_text", root="model.")))
    assert any("'model.'" in text for text in likely_causes(Case("vllm", "0.32.0", unread, "low")))
