"""Two processes train as one does: data parallel, and with weights and moments split."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import SCRIPTS
from support.training_runs import flags, metrics, trained, write_inputs

SHORT = {"epochs": 1, "eval_every": 3, "save_every": 2, "average": 0.5}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def alone(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    trained(inputs, run, **SHORT)
    return run


def command(inputs: Path, run: Path) -> list[str]:
    words = ["train", str(inputs / "model"), "--data", str(inputs / "data"), "--out", str(run)]
    return [*words, *flags(**SHORT)]


def torchrun(inputs: Path, run: Path) -> str:
    """What two processes say under torchrun; gloo, for there is no GPU."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    words = [*launcher, *rendezvous, "-m", "headstart", *command(inputs, run)]
    result = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return result.stdout


def sharded(inputs: Path, run: Path) -> str:
    """The same of two that were forked, which takes less time, with --shard."""
    words = ["headstart", *command(inputs, run), "--shard"]
    code = f"import sys\nsys.argv = {words!r}\nfrom headstart.cli.main import main\nmain()"
    result = subprocess.run(
        [sys.executable, str(SCRIPTS / "two_ranks.py")], capture_output=True, text=True,
        input=json.dumps({"train": code}), timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    ranks = json.loads(result.stdout)["train"]
    assert [code for code, _, _ in ranks] == [0, 0], ranks
    return "".join(out for _, out, _ in ranks)


@pytest.mark.usefixtures("quick_processes")
@pytest.mark.parametrize("start", [torchrun, sharded], ids=["data parallel", "sharded"])
def test_two_processes_give_the_losses_and_weights_of_one(
    inputs: Path, alone: Path, tmp_path: Path, start: Callable[[Path, Path], str]
) -> None:
    run = tmp_path / "run"
    assert start(inputs, run).count("finished at step") == 1, "only one process speaks"
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
