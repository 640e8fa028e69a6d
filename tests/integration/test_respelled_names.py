"""Heads whose tensors some checkpoints name otherwise: read everywhere, written as usual."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine_runs import checkpoint, greedy, ids_of, make_prompts, run, start
from support.head_edits import Tensors, differing, edited, export, head_names, stitch, tensors
from support.tiny_fixture import Tiny

from headstart.checkpoint.reader import Checkpoint
from headstart.errors import LaunchError
from headstart.heads.inspection import inspect
from headstart.launch import LaunchOptions, build
from headstart.launch.versions import NEWEST

OTHERS = {
    "model.mtp_layers.0.": "model.mtp.layers.0.",
    "self_attn.linear_gate.": "self_attn.g_proj.",
    "mlp.gate.": "mlp.router.gate.",
}


@pytest.fixture(scope="module")
def usual(tiny: Tiny) -> Path:
    return checkpoint(tiny, "hy_v4")


@pytest.fixture(scope="module", params=OTHERS)
def respelled(
    usual: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    def change(own: Tensors) -> None:
        for name in list(head_names(usual).values()):
            own[name.replace(request.param, OTHERS[request.param])] = own.pop(name)

    return edited(usual, tmp_path_factory.mktemp("hy") / "model", change=change)


def test_the_head_is_whole_and_the_names_are_said(respelled: Path) -> None:
    report = inspect(Checkpoint.open(respelled))
    assert (report.head.state, report.head.missing) == ("complete", ())
    assert any("other names than vLLM and SGLang ask for" in text for text in report.warnings)
    for engine in ("vllm", "sglang"):
        with pytest.raises(
            LaunchError, match=r"skips those and drafts nothing\. `headstart stitch"
        ):
            build(engine, report, LaunchOptions(), NEWEST[engine])
    assert build("vllm", report, LaunchOptions(speculate=0), NEWEST["vllm"])


def test_the_usual_names_are_written(respelled: Path, usual: Path, tmp_path: Path) -> None:
    whole = stitch(respelled, respelled, tmp_path / "whole")
    assert not differing(tensors(whole), tensors(usual))
    assert not inspect(Checkpoint.open(whole)).head.respelled
    exported = tensors(export(respelled, "sglang", tmp_path / "head"))
    assert not differing(exported, tensors(export(usual, "sglang", tmp_path / "usual")))


def test_the_engine_drafts_the_same(respelled: Path, usual: Path) -> None:
    found = []
    for folder in (usual, respelled):
        engine = start(folder, speculate=3)
        texts = ids_of(run(engine, make_prompts(3), greedy(10)))
        found.append((texts, engine.stats.acceptance.accepted))
    assert found[0] == found[1] and found[0][1][0] > 0
