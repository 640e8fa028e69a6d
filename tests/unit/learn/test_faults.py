"""A step that diverges, in the learner's own loop: the long runs have it beside a server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.learning_runs import collect, learnable_heads

from headstart.engine.engine import Engine
from headstart.learn.assembly import make_loop
from headstart.learn.faults import NAN
from headstart.learn.folder import Folder
from headstart.learn.heads import LearnedHeads
from headstart.learn.options import LearnOptions
from headstart.learn.starting import open_folder
from headstart.learn.training import HeadTraining


def weights(own: HeadTraining, name: str) -> dict[str, torch.Tensor]:
    learner = getattr(own, name)
    return {key: value.detach().clone() for key, value in learner.parameters.items()}


def test_a_step_that_diverges_leaves_the_serving_head_and_learning_goes_on(
    tmp_path: Path,
) -> None:
    heads = learnable_heads(tmp_path)
    folder = Folder(tmp_path / "learned")
    engine = Engine(heads.model, heads.weak, speculate=3, threads=1, kernels="off")
    collect(engine, folder)
    options = LearnOptions(learn=folder.path)
    task = open_folder(options, str(heads.model), heads.weak, device="cpu", dtype="float32")
    told: list[tuple[str, dict[str, Any]]] = []
    task = replace(
        task, head=str(folder.heads / "start"), fault=NAN, warm_up=1,
        overrides={"learning_rate": 3e-3, "batch_tokens": 256},
    )  # fmt: skip
    loop = make_loop(task, lambda name, facts: told.append((name, facts)))
    training = loop._training
    before = weights(training, "_serving")
    while "diverged" not in dict(told):
        assert loop.turn()
    assert [name for name, _ in told].count("step") == 2
    assert "a training step failed" in dict(told)["diverged"]["reason"]
    for copy in ("_serving", "_learner", "_mean"):
        found = weights(training, copy)
        assert all(torch.equal(found[name], value) for name, value in before.items()), copy
    told.clear()
    for _ in range(3):
        assert loop.turn()
    steps = [facts for name, facts in told if name == "step"]
    assert len(steps) == 3 and all(0 < facts["loss"] < 10 for facts in steps)
    assert steps[0]["rate"] == 3e-3 / 2, "more carefully"
    assert LearnedHeads(folder).serving is None and not list(folder.heads.glob("0*"))
