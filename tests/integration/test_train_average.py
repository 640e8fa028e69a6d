"""Runs that write a running mean of the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.training_runs import StopAt, metrics, trained, weights, write_inputs

from headstart.checkpoint.config import Config
from headstart.checkpoint.provenance import training_of
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.values import load
from headstart.heads.formats import open_head
from headstart.heads.head import head_of
from headstart.models.config_reader import model_config
from headstart.models.head_parts import split_parameters
from headstart.train import trainer
from headstart.train.averaging import AVERAGE
from headstart.train.head_run import HeadRun
from headstart.train.learner import Learner
from headstart.train.validation import Validation, validate

MEAN: dict[str, Any] = {
    "average": 0.3, "schedule": "wsd", "final_rate": 0.05, "epochs": 1, "save_every": 1, "keep": 99,
    "eval_every": 3, "num_depths": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    assert trained(inputs, run, **MEAN).is_finished
    return run


def masters(run: Path, step: int, before: str = "master.") -> dict[str, torch.Tensor]:
    found = load_file(run / "checkpoints" / f"step-{step:08d}.safetensors")
    return {n.removeprefix(before): v for n, v in found.items() if n.startswith(before)}


def test_the_mean_leaves_the_share_that_was_asked_for(whole: Path) -> None:
    mean = masters(whole, 0)
    for step in range(1, 7):
        left = min(0.3, step / (9 + step))  # the first steps forget the beginning
        new = masters(whole, step)
        mean = {name: left * value + (1 - left) * new[name] for name, value in mean.items()}
        kept = masters(whole, step, AVERAGE)
        assert kept.keys() == new.keys()
        for name, value in mean.items():
            torch.testing.assert_close(kept[name], value, atol=1e-6, rtol=1e-5)


def test_the_mean_changes_no_step(inputs: Path, whole: Path, tmp_path: Path) -> None:
    trained(inputs, tmp_path / "plain", **{**MEAN, "average": 0.0})
    last = max(int(path.stem[5:]) for path in (whole / "checkpoints").iterdir())
    plain, kept = masters(tmp_path / "plain", last), masters(whole, last)
    assert all(torch.equal(plain[name], value) for name, value in kept.items())
    here, there = metrics(whole), metrics(tmp_path / "plain")
    assert [line for line in here if "loss" in line] == [line for line in there if "loss" in line]


def test_the_mean_is_validated_and_written(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, torch.Tensor]] = []

    def spy(learners: list[Learner], *given: Any, **settings: Any) -> list[Validation]:
        seen.append({n: p.detach().clone() for n, p in learners[0].parameters.items()})
        return validate(learners, *given, **settings)

    def latest(own: HeadRun, found: Validation) -> None:
        own.progress = replace(own.progress, best_step=own.progress.step)

    monkeypatch.setattr(trainer, "validate", spy)
    monkeypatch.setattr(HeadRun, "judge", latest)
    run = tmp_path / "run"
    trained(inputs, run, **MEAN)
    steps = [line["step"] for line in metrics(run) if "validation" in line]
    for step, tried in zip(steps, seen, strict=True):
        mean = masters(run, step, AVERAGE)
        assert all(torch.equal(mean[name], value) for name, value in tried.items())
    training = training_of(run / "head")
    assert training is not None and training["step"] == training["of"]
    written = open_head(run / "head").tensors
    config = model_config(Config(dict(head_of(Checkpoint.open(inputs / "model")).config)).fields)
    mean, steps_own = (
        split_parameters(masters(run, training["step"], name), config, written)
        for name in (AVERAGE, "master.")
    )
    assert all(torch.equal(load(written[name]), value) for name, value in mean.items())
    assert any(not torch.equal(steps_own[name], value) for name, value in mean.items())


def test_a_stopped_run_goes_on_with_its_mean(inputs: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for stop in (2, 4):
        assert not trained(inputs, run, StopAt(stop), **MEAN).is_finished
    assert trained(inputs, run, **MEAN).is_finished
    assert weights(run) == weights(whole) and metrics(run) == metrics(whole)
