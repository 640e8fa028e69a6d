"""Heads trained side by side: begun together, stopped anywhere, one of them diverging."""

from __future__ import annotations

import json
import resource
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.long_runs import unless_long
from support.training_data import random_records, record, write_data
from support.training_runs import StopAt, job, metrics, trained, weights, write_inputs

from headstart.calibrate.tiny import write_tiny
from headstart.errors import DataError, TrainError
from headstart.train.checkpoints import Checkpoints, Progress
from headstart.train.job import Job
from headstart.train.parallel import World
from headstart.train.plan import plan
from headstart.train.session import open_session
from headstart.train.trainer import train
from headstart.train.watching import Watch

SHORT = {"epochs": 1, "eval_every": 2, "save_every": 2}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def study(inputs: Path, out: Path, *names: str, **changes: dict[str, Any]) -> Job:
    """Heads named for their losses, or with changes of their own."""
    one = job(inputs, out, **SHORT)
    own: dict[str, dict[str, Any]] = {name: changes.get(name, {"loss": name}) for name in names}
    return replace(one, options={n: replace(one.shared, **part) for n, part in own.items()})


def steps(run: Path) -> list[int]:
    return Checkpoints(run / "checkpoints", 2).steps()


def test_a_variant_cannot_be_added_to_others_that_have_begun(inputs: Path, tmp_path: Path) -> None:
    """The finished one was trained again, and its old checkpoints ate the new ones."""
    out = tmp_path / "run"
    train(study(inputs, out, "lk"), StopAt(3))
    with pytest.raises(TrainError, match=r"lk has begun and has no checkpoint .* with ce"):
        train(study(inputs, out, "lk", "ce"))
    train(study(inputs, out, "lk"))
    before = weights(out / "lk")
    for attempt in (train, lambda given: plan(given, Watch())):
        with pytest.raises(TrainError, match="lk finished training and ce did not"):
            attempt(study(inputs, out, "lk", "ce"))
    assert not (out / "ce").exists() and weights(out / "lk") == before
    assert train(study(inputs, out, "ce"))[0].is_finished


def test_checkpoints_of_later_steps_do_not_outlive_going_back(inputs: Path, tmp_path: Path) -> None:
    """Two heads that were trained apart: what was saved at step 3 was deleted at once."""
    out = tmp_path / "run"
    train(study(inputs, out, "lk"), StopAt(6))
    train(study(inputs, out, "ce"), StopAt(4))
    watch = StopAt(5)
    train(study(inputs, out, "lk", "ce"), watch)
    assert "going on from step 4" in " ".join(watch.said)
    assert steps(out / "lk")[-1] == steps(out / "ce")[-1] == 5
    again = StopAt(6)
    train(study(inputs, out, "lk", "ce"), again)
    assert "going on from step 5" in " ".join(again.said)


@pytest.mark.parametrize("moment", unless_long(range(1, 3), range(4)))
def test_a_kill_between_two_heads_saves_leaves_a_common_step(
    moment: int, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    out = tmp_path / "run"
    one = study(inputs, out, "lk", "ce")
    one = replace(one, options={n: replace(own, keep=1) for n, own in one.options.items()})
    train(one, StopAt(2))
    left = moment
    for name in ("write", "prune"):
        real = getattr(Checkpoints, name)

        def deadly(*arguments: Any, real: Any = real) -> None:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            real(*arguments)

        monkeypatch.setattr(Checkpoints, name, deadly)
    with pytest.raises(Killed):
        train(one)
    monkeypatch.undo()
    watch = StopAt(5)
    train(one, watch)
    assert f"going on from step {2 if moment < 2 else 4}" in " ".join(watch.said)


def test_every_checkpoint_that_is_kept_has_its_best_beside_it(tmp_path: Path) -> None:
    """Without it, a run that went back to the one before ended at a best that was not there."""
    kept = Checkpoints(tmp_path, 2)
    for step, best in ((0, 0), (2, 0), (4, 4)):
        kept.write({"master.x": torch.zeros(1)}, Progress(step, best, 1.0))
        kept.prune()
    assert kept.steps() == [0, 2, 4]
    kept.write({"master.x": torch.zeros(1)}, Progress(6, 4, 1.0))
    kept.prune()
    assert kept.steps() == [4, 6]


def test_a_checkpoint_that_does_not_fit_is_said_and_leaves_the_others(tmp_path: Path) -> None:
    """The system's own refusal of large files, which safetensors raises as an error of its own."""
    kept = Checkpoints(tmp_path, 2)
    kept.write({"master.x": torch.zeros(1)}, Progress(1, 1, 1.0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(
            TrainError, match=r"00002.* could not be written \(.*too large.*Make room"
        ):
            kept.write({"master.x": torch.zeros(4096)}, Progress(2, 2, 1.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert kept.steps() == [1] and len(list(tmp_path.iterdir())) == 1


def test_a_diverging_head_is_dropped_and_the_others_go_on(inputs: Path, tmp_path: Path) -> None:
    out, watch = tmp_path / "run", StopAt(1000)
    both = study(inputs, out, "wild", "lk", wild={"learning_rate": 1e30})
    good, bad = train(both, watch)
    assert (good.name, good.is_finished, bad.name, bad.is_finished) == ("lk", True, "wild", False)
    assert bad.failure is not None and "not a finite number at step" in bad.failure
    assert any("go on without it" in text for text in watch.said)
    assert json.loads((out / "wild" / "failed.json").read_text())["error"] == bad.failure
    assert not (out / "wild" / "head").exists() and (out / "report.html").is_file()
    trained(inputs, tmp_path / "alone", **SHORT)
    assert weights(out / "lk") == weights(tmp_path / "alone")
    assert metrics(out / "lk") == metrics(tmp_path / "alone")
    with pytest.raises(TrainError, match="holds a finished run"):
        train(both)


def test_a_dropped_head_stays_dropped_on_resuming(inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    both = study(inputs, out, "wild", "lk", wild={"learning_rate": 1e30})
    stopped = train(both, StopAt(4))
    assert stopped[0].name == "lk" and stopped[0].step == 4
    watch = StopAt(1000)
    (good,) = train(both, watch)
    assert good.is_finished and any("wild stays left out" in text for text in watch.said)
    with pytest.raises(TrainError, match=r"run/wild was dropped from training: .*--overwrite"):
        train(replace(both, options={"wild": both.options["wild"]}))


@pytest.mark.parametrize("rate", [1e30, 1e300], ids=str)
def test_the_only_head_that_diverges_ends_the_run(
    rate: float, inputs: Path, tmp_path: Path
) -> None:
    """1e300, which fp32 cannot hold, ended with the optimiser's own traceback."""
    with pytest.raises(TrainError, match="lower --learning-rate"):
        trained(inputs, tmp_path / "run", learning_rate=rate, **SHORT)
    assert not (tmp_path / "run" / "failed.json").exists()


def test_a_loss_that_no_answer_is_long_enough_for_is_refused(inputs: Path, tmp_path: Path) -> None:
    """It ended with loss 0.0 and said that it had finished."""
    brief = [record(f"r{i}", range(2, 8), 2) for i in range(4)]
    write_tiny("mimo", tmp_path / "model", dtype="F32")
    write_data(tmp_path / "model", tmp_path / "data", brief)
    with pytest.raises(DataError, match=r"e2e-tv with K 5 .* Lower --num-depths"):
        trained(tmp_path, tmp_path / "run", num_depths=5, loss="e2e-tv")
    assert not (tmp_path / "run").exists()
    trained(tmp_path, tmp_path / "run", num_depths=4, loss="e2e-tv", **SHORT)
    trained(tmp_path, tmp_path / "other", num_depths=5, loss="lk", **SHORT)


def test_validation_sees_all_categories(inputs: Path, tmp_path: Path) -> None:
    """The first records of a sorted file were often of one prompt or category."""
    heldout = [record(f"h{i:02}", range(2, 12), 2, "a" if i < 30 else "b") for i in range(40)]
    write_tiny("mimo", tmp_path / "model", dtype="F32")
    write_data(tmp_path / "model", tmp_path / "data", random_records(8), heldout)
    given = job(tmp_path, tmp_path / "run", eval_limit=8, **SHORT)
    session = open_session(given, World(), "cpu", Watch(), ExitStack())
    found = [one.category for one in session.heldout]
    assert len(found) == 8 and found.count("b") == 2
