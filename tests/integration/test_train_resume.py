"""Runs that are stopped, killed, resumed, refused."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.long_runs import unless_long
from support.training_runs import StopAt, flags, metrics, trained, weights, write_inputs

from headstart.errors import TrainError


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    outcome = trained(inputs, run)
    assert outcome.is_finished and outcome.num_steps == outcome.step >= 12
    return run


def command(inputs: Path, run: Path) -> list[str]:
    words = ["train", str(inputs / "model"), "--data", str(inputs / "data"), "--out", str(run)]
    return [sys.executable, "-m", "headstart", *words, *flags()]


def test_resume(inputs: Path, whole: Path, tmp_path: Path) -> None:
    """2N steps equal N + resume + N, bit for bit; here with several stops."""
    run = tmp_path / "run"
    for stop in unless_long((5, 11), (0, 4, 5, 11)):
        outcome = trained(inputs, run, StopAt(stop))
        assert not outcome.is_finished and outcome.step == stop
        assert not (run / "head").exists()
    watch = StopAt(1000)
    assert trained(inputs, run, watch).is_finished
    assert "going on from step 11" in " ".join(watch.said)
    assert weights(run) == weights(whole)
    assert metrics(run) == metrics(whole)


@pytest.mark.usefixtures("quick_processes")
def test_resume_after_a_kill_is_as_if_nothing_had_happened(
    inputs: Path, whole: Path, tmp_path: Path
) -> None:
    run, moments = tmp_path / "run", random.Random(4)
    kills = 0
    for _ in range(2):
        process = subprocess.Popen(command(inputs, run), stderr=subprocess.PIPE)
        begun = metrics_size(run)
        while process.poll() is None and metrics_size(run) == begun:
            time.sleep(0.005)  # until it has begun to train
        time.sleep(moments.uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
    assert kills > 0
    if not (run / "head").exists():
        assert trained(inputs, run).is_finished
    assert weights(run) == weights(whole)
    assert metrics(run) == metrics(whole)
    assert not list(run.rglob("*.partial*"))


def metrics_size(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.stat().st_size if path.exists() else -1


def test_what_a_kill_tore_is_cut_off(inputs: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(inputs, run, StopAt(6))
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "loss": 1.0}\n{"step": 8, "lo')
    (run / "checkpoints" / ".step-00000007.safetensors.partial").write_bytes(b"half")
    assert trained(inputs, run).is_finished
    assert weights(run) == weights(whole) and metrics(run) == metrics(whole)


@pytest.mark.usefixtures("quick_processes")
def test_interrupt_saves_and_says_how_to_go_on(inputs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = subprocess.Popen(command(inputs, run), stderr=subprocess.PIPE, text=True)
    while process.poll() is None and metrics_size(run) <= 0:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    assert process.returncode == 130, said
    assert "run the same command to go on" in said and "Traceback" not in said
    assert list(run.glob("checkpoints/*.safetensors"))


def test_the_newest_checkpoints_and_the_best_are_kept(whole: Path) -> None:
    steps = sorted(int(path.stem[5:]) for path in whole.glob("checkpoints/*.safetensors"))
    lengths = {
        line["step"]: line["validation"]["acceptance_length"]
        for line in metrics(whole)
        if "validation" in line
    }
    best = max(lengths, key=lambda step: (lengths[step], -step))
    assert set(lengths) == {0, 5, 10, max(steps)}
    assert best in steps and 2 <= len(steps) <= 3


def test_a_finished_run_is_refused_without_overwrite(inputs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(inputs, run, epochs=1)
    first = weights(run)
    with pytest.raises(TrainError, match="holds a finished run"):
        trained(inputs, run, epochs=1)
    assert weights(run) == first
    trained(inputs, run, epochs=1, seed=3, overwrite=True)
    assert weights(run) != first


def test_another_option_is_refused_by_name(inputs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(inputs, run, StopAt(2))
    with pytest.raises(TrainError, match="was begun with seed 0, now 4"):
        trained(inputs, run, seed=4)


def test_options_that_an_older_run_did_not_have_are_as_by_default(
    inputs: Path, tmp_path: Path
) -> None:
    """Regression: new options made every stopped run of the version before another one."""
    run = tmp_path / "run"
    trained(inputs, run, StopAt(2))
    found = json.loads((run / "options.json").read_text())
    for name in ("average", "decay", "final_rate", "warmup"):
        del found["options"][name]
    (run / "options.json").write_text(json.dumps(found))
    with pytest.raises(TrainError, match=r"was begun with average 0\.0, now 0\.5\. Run it"):
        trained(inputs, run, average=0.5)
    with pytest.raises(TrainError, match=r"was begun with warmup 0\.05, now 0\.2\. Run it"):
        trained(inputs, run, warmup=0.2)
    assert trained(inputs, run).is_finished


def test_a_folder_that_is_no_run_is_left_alone(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(TrainError, match="is no run"):
            trained(inputs, tmp_path, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
