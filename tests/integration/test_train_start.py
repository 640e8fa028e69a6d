"""What a run checks before it begins, and that one which cannot begin leaves nothing."""

from __future__ import annotations

import errno
import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.commands import headstart
from support.training_data import random_records, write_data
from support.training_runs import StopAt, flags, job, trained, write_inputs
from support.training_runs import metrics as metrics_of

from headstart.calibrate.tiny import write_tiny
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import BadConfig, ConfigError, DataError, HeadNotFound, TrainError
from headstart.heads.export import plan_export
from headstart.heads.formats import open_head
from headstart.heads.graft import plan_graft
from headstart.heads.head import head_of
from headstart.train.plan import Plan, plan
from headstart.train.trainer import train
from headstart.train.watching import Watch

SHORT = {"epochs": 1, "eval_every": 4}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def test_a_model_without_a_head_is_refused(inputs: Path, tmp_path: Path) -> None:
    write_tiny("mimo", tmp_path / "model", dtype="F32", with_head=False)
    shutil.copytree(inputs / "data", tmp_path / "data")
    with pytest.raises(HeadNotFound, match="headstart graft"):
        trained(tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_cannot_load_its_head_leaves_nothing(inputs: Path, tmp_path: Path) -> None:
    """The folder was made before the head was opened, and the next try was refused for it."""
    write_tiny("mimo", tmp_path / "other", dtype="F32", vocab_size=96)
    plan_export(head_of(Checkpoint.open(tmp_path / "other")), "headstart").write(tmp_path / "head")
    with pytest.raises(ConfigError, match="the head is for hidden 256 and 96 tokens"):
        train(replace(job(inputs, tmp_path / "run", **SHORT), head=tmp_path / "head"))
    assert not (tmp_path / "run").exists()


def test_data_distilled_before_grafting_is_the_grafted_models_own(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "bare", dtype="F32", with_head=False)
    plan_graft(Checkpoint.open(tmp_path / "bare")).write(tmp_path / "model")
    write_data(tmp_path / "bare", tmp_path / "data", random_records(9), random_records(2))
    watch = StopAt(0)
    trained(tmp_path, tmp_path / "run", watch, **SHORT)
    assert not any("another trunk" in text for text in watch.said)


def test_another_head_is_refused_in_words(inputs: Path, tmp_path: Path) -> None:
    trained(inputs, tmp_path / "run", StopAt(1), **SHORT)
    plan_export(head_of(Checkpoint.open(inputs / "model")), "headstart").write(tmp_path / "head")
    said = r"was begun with another head to start from\. Run it as .* \(head \w{12}, now \w{12}\)"
    with pytest.raises(TrainError, match=said):
        train(replace(job(inputs, tmp_path / "run", **SHORT), head=tmp_path / "head"))


def test_the_folder_of_a_run_is_not_taken_for_its_head(inputs: Path, tmp_path: Path) -> None:
    head = head_of(Checkpoint.open(inputs / "model"))
    plan_export(head, "headstart").write(tmp_path / "run" / "head")
    with pytest.raises(BadConfig, match=r"has no config\.json\. Did you mean .*run/head\?"):
        open_head(tmp_path / "run")


def test_variants_do_not_go_into_the_run_of_one_head(inputs: Path, tmp_path: Path) -> None:
    trained(inputs, tmp_path / "run", StopAt(0), **SHORT)
    one = job(inputs, tmp_path / "run", **SHORT)
    with pytest.raises(TrainError, match="is a run of one head"):
        train(replace(one, options={"a": one.shared, "b": one.shared}))


def test_little_data_gives_fifty_steps_and_max_steps_fewer(inputs: Path, tmp_path: Path) -> None:
    watch = StopAt(1)
    sizes = {"batch_tokens": None, "epochs": 3}
    outcome = trained(inputs, tmp_path / "run", watch, **sizes)
    assert 50 <= outcome.num_steps <= 60
    assert any("instead of 65536, towards 50 steps" in text for text in watch.said)
    ended = trained(inputs, tmp_path / "brief", max_steps=2, **sizes)
    assert ended.is_finished and ended.step == ended.num_steps == 2


def test_the_command_line_refuses_k_below_1_and_plans_without_writing(
    inputs: Path, tmp_path: Path
) -> None:
    command = ["train", str(inputs / "model"), "--data", str(inputs / "data")]
    bad = headstart(*command, "--num-depths", "0")
    assert bad.returncode == 2 and "--num-depths is 0" in bad.stderr
    result = headstart(*command, "--dry-run", *flags(), cwd=tmp_path)
    assert result.returncode == 0 and "14 steps, 7 in each of 2 epochs" in result.stderr
    assert "loss lk, context prefix, K 2, learning rate 0.003 (cosine)" in result.stdout
    assert not list(tmp_path.iterdir())


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_one_runs(
    inputs: Path, tmp_path: Path
) -> None:
    refused = r"another run is writing .*run right now"

    class Second(StopAt):
        def stepped(self, step: int, metrics: Any) -> None:
            super().stepped(step, metrics)
            before = metrics_of(out)
            for overwrite in (False, True):
                with pytest.raises(TrainError, match=refused):
                    trained(inputs, out, overwrite=overwrite, **SHORT)
            assert metrics_of(out) == before

    out = tmp_path / "run"
    assert trained(inputs, out, Second(1), **SHORT).step == 1
    assert trained(inputs, out, StopAt(2), **SHORT).step == 2  # no other run is there any more


def test_a_full_disk_is_named_with_what_to_do(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("headstart.train.run_folder.Metrics.add", full)
    with pytest.raises(TrainError, match=r"no space left on the disk of .*run.* run the same"):
        trained(inputs, tmp_path / "run", **SHORT)


def test_of_two_runs_that_begin_at_once_one_is_refused(inputs: Path, tmp_path: Path) -> None:
    first, second = (plan(job(inputs, tmp_path / "run", **SHORT), Watch()) for _ in range(2))
    with ExitStack() as locks:
        first.folders[""].start(overwrite=False, locks=locks)
        with pytest.raises(TrainError, match="another run is writing"):
            second.folders[""].start(overwrite=False, locks=locks)
    with ExitStack() as locks:
        second.folders[""].start(overwrite=False, locks=locks)


def test_a_dry_run_tells_what_is_resumed_and_refuses_what_the_run_would(
    inputs: Path, tmp_path: Path
) -> None:
    trained(inputs, tmp_path / "half", StopAt(3), **SHORT)
    cache = tmp_path / "cache"
    stored = {"cache": str(cache), **SHORT}

    def planned(out: Path, **options: Any) -> Plan:
        return plan(job(inputs, out, **options), Watch())

    found = planned(tmp_path / "half", **SHORT)
    document = found.as_json()
    assert document["resumed_step"] == 3 and document["steps"] == 7
    assert document["tokens_per_step"] == 89 and document["options"]["head"]["loss"] == "lk"
    assert "goes on from step 3" in found.describe()
    assert planned(tmp_path / "new", **stored).cache_bytes == 2 * 256 * (625 + 98)
    assert not cache.exists() and not (tmp_path / "new").exists()
    with pytest.raises(TrainError, match=r"was begun with learning_rate 0\.003, now 0\.1"):
        planned(tmp_path / "half", **{**SHORT, "learning_rate": 0.1})
    with pytest.raises(TrainError, match="finished run"):
        (tmp_path / "done" / "head").mkdir(parents=True)
        planned(tmp_path / "done", **SHORT)
    trained(inputs, tmp_path / "cached", StopAt(1), **stored)
    with pytest.raises(DataError, match="fp8"):
        planned(tmp_path / "other", **stored, cache_dtype="fp8")
    words = ["train", str(inputs / "model"), "--data", str(inputs / "data"), *flags(**SHORT)]
    result = headstart(*words, "--out", str(tmp_path / "half"), "--dry-run", "--json")
    assert json.loads(result.stdout)["resumed_step"] == 3
