"""Two processes train as one does: data parallel, and with weights and moments split."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.training_runs import flags, metrics, trained, write_inputs

SHORT = {"epochs": 1, "eval_every": 3, "save_every": 2}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def alone(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    trained(inputs, run, **SHORT)
    return run


def torchrun(inputs: Path, run: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Under torchrun with two processes; gloo, for there is no GPU."""
    words = ["train", str(inputs / "model"), "--data", str(inputs / "data"), "--out", str(run)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = [*launcher, *rendezvous, "-m", "headstart", *words, *flags(**SHORT), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("more", [(), ("--shard",)], ids=["data parallel", "sharded"])
def test_two_processes_give_the_losses_and_weights_of_one(
    inputs: Path, alone: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    result = torchrun(inputs, run, *more)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("finished at step") == 1, "only one process speaks"
    pairs = list(zip(metrics(run), metrics(alone), strict=True))
    assert len(pairs) > 6
    for here, there in pairs:
        if "loss" in here:
            values = [here["loss"], *here["loss_by_depth"], *here["cumulative_match"]]
            wanted = [there["loss"], *there["loss_by_depth"], *there["cumulative_match"]]
            assert values == pytest.approx(wanted, abs=1e-6)
        else:
            assert here == there
    mine, theirs = (newest(folder) for folder in (run, alone))
    # Adam divides by the size of a gradient: where that is all rounding, signs may differ.
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=2e-5)


def newest(run: Path) -> dict[str, torch.Tensor]:
    return load_file(max(run.glob("checkpoints/*.safetensors")))
