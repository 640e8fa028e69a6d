"""What a run gives, and what it refuses: heads, reports, caches, variants, bad inputs."""

from __future__ import annotations

import json
import shutil
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.long_runs import unless_long
from support.training_data import random_records, record, write_data
from support.training_runs import QUICK, StopAt, job, metrics, trained, weights, write_inputs

from headstart.calibrate.tiny import write_tiny
from headstart.checkpoint.config import Config
from headstart.checkpoint.provenance import training_of
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.values import load
from headstart.cli.train_watch import describe, ranking
from headstart.errors import DataError, TrainError
from headstart.heads.export import plan_convert, plan_export
from headstart.heads.formats import open_head
from headstart.heads.head import Head, head_of
from headstart.heads.stitch import plan_stitch
from headstart.models.config_reader import model_config
from headstart.models.head_parts import split_parameters
from headstart.train import trainer
from headstart.train.head_run import HeadRun
from headstart.train.learner import Learner
from headstart.train.options import TrainOptions
from headstart.train.packing import Row
from headstart.train.step import Batch
from headstart.train.trainer import Outcome, Trainer, train
from headstart.train.validation import Validation, validate
from headstart.train.variants import read_variants
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import write as write_vocab

SHORT = {"epochs": 1, "eval_every": 4}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def run(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    # On the training answers themselves, so that the head does get better.
    trained(inputs, run, **SHORT)
    return run


def values(head: Head) -> dict[str, torch.Tensor]:
    return {name: load(source) for name, source in head.tensors.items()}


def test_the_result_is_a_head_that_every_command_takes(
    inputs: Path, run: Path, tmp_path: Path
) -> None:
    stock, tuned = head_of(Checkpoint.open(inputs / "model")), open_head(run / "head")
    assert {n: s.dtype for n, s in tuned.tensors.items()} == {
        n: s.dtype for n, s in stock.tensors.items()
    }
    plan_stitch(tuned, Checkpoint.open(inputs / "model")).write(tmp_path / "stitched")
    stitched = head_of(Checkpoint.open(tmp_path / "stitched"))
    plan_export(stitched, "headstart").write(tmp_path / "again")
    model = Checkpoint.open(inputs / "model")
    plan_convert(tuned, "xllm", model=model).write(tmp_path / "xllm")
    for other in (stitched, open_head(tmp_path / "again"), open_head(tmp_path / "xllm")):
        found = values(other)
        assert all(torch.equal(found[name], value) for name, value in values(tuned).items())
    histories = [training_of(tmp_path / name) for name in ("stitched", "again", "xllm")]
    own = training_of(run / "head")
    assert histories == [own] * 3, "what it was trained for goes with it"
    assert (
        own is not None
        and own["num_depths"] == job(inputs, tmp_path, **SHORT).options[""].num_depths
    )
    assert training_of(inputs / "model") is None


def test_the_head_is_the_best_checkpoint_and_the_report_says_so(run: Path) -> None:
    lines = [line for line in metrics(run) if "validation" in line]
    lengths = {line["step"]: line["validation"]["acceptance_length"] for line in lines}
    best = max(lengths, key=lambda step: (lengths[step], -step))
    details = json.loads((run / "head" / "headstart.json").read_text())["training"]
    assert details["step"] == best
    report = (run / "report.html").read_text()
    for word in ("Loss by depth", "Cumulative acceptance by depth", "before", "odd", "even"):
        assert word in report
    options = json.loads((run / "options.json").read_text())
    assert options["options"]["loss"] == "lk" and options["data"]


def test_training_goes_on_from_a_given_head(inputs: Path, run: Path, tmp_path: Path) -> None:
    given = replace(job(inputs, tmp_path / "run", **SHORT), head=run / "head")
    train(given)
    first = next(line for line in metrics(tmp_path / "run") if "loss" in line)
    stock = [line for line in metrics(run) if "loss" in line]
    assert abs(first["loss"] - stock[0]["loss"]) > 1e-4


def test_cached_states_train_as_computed_ones(inputs: Path, run: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    watch = StopAt(1000)
    for name, said in (("first", True), ("second", False)):
        watch.said.clear()
        trained(inputs, tmp_path / name, watch, cache=cache, cache_dtype="fp32", **SHORT)
        assert any("MB in" in text for text in watch.said) is said, "the disk bill, once"
        for here, there in zip(metrics(tmp_path / name), metrics(run), strict=True):
            if "loss" in here:
                assert here["loss"] == pytest.approx(there["loss"], abs=1e-5)


def test_a_cache_of_other_states_is_refused(inputs: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    trained(inputs, tmp_path / "run", StopAt(1), cache=cache, **SHORT)
    with pytest.raises(DataError, match="dataset_fingerprint"):
        trained(inputs, tmp_path / "cut", cache=cache, max_len=9, **SHORT)
    assert not (tmp_path / "cut").exists()
    with pytest.raises(DataError, match="dtype is 'bf16', expected 'fp8'"):
        trained(inputs, tmp_path / "fp8", cache=cache, cache_dtype="fp8", **SHORT)


def test_variants_are_the_runs_that_each_would_be_alone(inputs: Path, tmp_path: Path) -> None:
    overrides: dict[str, dict[str, Any]] = {
        "lk": {}, "ce": {"loss": "ce", "context": "sequence"},
        "deep": {"loss": "e2e-tv", "num_depths": 3, "learning_rate": 1e-4},
    }  # fmt: skip
    file = tmp_path / "variants.json"
    entries = [{"name": name, "overrides": part} for name, part in overrides.items()]
    file.write_text(json.dumps(entries))
    base = job(inputs, tmp_path / "together", **SHORT)
    options = read_variants(file, TrainOptions(**{**QUICK, **SHORT}))
    stopped = train(replace(base, options=options), StopAt(3))
    assert [outcome.step for outcome in stopped] == [3, 3, 3]
    # As if it was killed while the second head's checkpoint was written.
    (tmp_path / "together" / "ce" / "checkpoints" / "step-00000003.safetensors").unlink()
    assert all(outcome.is_finished for outcome in train(replace(base, options=options)))
    for name in unless_long(("deep",), ("lk", "deep")):
        alone = tmp_path / f"alone-{name}"
        trained(inputs, alone, **{**SHORT, **overrides[name]})
        assert weights(tmp_path / "together" / name) == weights(alone)
    page = (tmp_path / "together" / "report.html").read_text()
    assert "Heads trained side by side" in page and "loss ce, learning_rate 0.003" in page
    with pytest.raises(TrainError, match="finished run"):
        train(replace(base, options=options))


def test_a_draft_vocabulary_limits_what_is_learned(inputs: Path, tmp_path: Path) -> None:
    file = tmp_path / "vocab.json"
    write_vocab([DraftVocab(ids=tuple(range(0, 128, 2)), vocab_size=128)], file)
    trained(inputs, tmp_path / "run", StopAt(2), draft_vocab=str(file), loss="ce", **SHORT)
    lines = [line for line in metrics(tmp_path / "run") if "loss" in line]
    # Half of the labels cannot be drafted: their rows are dropped from ce, which is a mean of all.
    assert lines[0]["loss"] < 0.8 * 4.0
    with pytest.raises(DataError, match="vocabulary of 64 tokens"):
        write_vocab([DraftVocab(ids=(1, 2), vocab_size=64)], tmp_path / "other.json")
        trained(inputs, tmp_path / "x", draft_vocab=str(tmp_path / "other.json"), **SHORT)


def test_a_loss_that_is_not_a_number_names_step_and_records(
    inputs: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And loses nothing: once the cause is gone, the run ends as if it had never been."""
    prepare = Trainer.prepare

    def poisoned(self: Trainer, row: Row) -> Batch:
        batch = prepare(self, row)
        if "r7" in batch.names and self.step >= 3:
            batch.states[0] = torch.nan
        return batch

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "prepare", poisoned)
        said = r"at step \d+, with records .*\br7\b.*the checkpoint of step \d+ is whole"
        with pytest.raises(TrainError, match=said):
            trained(inputs, tmp_path / "run", **SHORT)
    assert trained(inputs, tmp_path / "run", **SHORT).is_finished
    assert weights(tmp_path / "run") == weights(run)


def test_data_of_another_tokenizer_is_refused(inputs: Path, tmp_path: Path) -> None:
    write_tiny("mimo", tmp_path / "model", dtype="F32", vocab_size=96)
    shutil.copytree(inputs / "data", tmp_path / "data")
    with pytest.raises(DataError, match="another tokenizer"):
        trained(tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_data_of_another_trunk_gives_a_warning(inputs: Path, tmp_path: Path) -> None:
    write_tiny("mimo", tmp_path / "model", dtype="F32", seed=3)
    shutil.copytree(inputs / "data", tmp_path / "data")
    watch = StopAt(1)
    trained(tmp_path, tmp_path / "run", watch)
    assert any("written by another trunk" in text for text in watch.said)


def test_empty_data_is_refused(inputs: Path, tmp_path: Path) -> None:
    shutil.copytree(inputs / "model", tmp_path / "model")
    write_data(tmp_path / "model", tmp_path / "data", [])
    with pytest.raises(DataError, match=r"has no record to train on .*--heldout.*filters"):
        trained(tmp_path, tmp_path / "run")
    write_data(tmp_path / "model", tmp_path / "data", [record("a", range(9), 9)])
    with pytest.raises(DataError, match="no record is left to train on"):
        trained(tmp_path, tmp_path / "run")


def test_without_held_out_records_the_last_weights_are_the_result(
    inputs: Path, tmp_path: Path
) -> None:
    shutil.copytree(inputs / "model", tmp_path / "model")
    write_data(tmp_path / "model", tmp_path / "data", random_records(20))
    outcome = trained(tmp_path, tmp_path / "run", **SHORT)
    assert outcome.is_finished and outcome.best_step == outcome.num_steps
    assert outcome.before is None


def test_records_longer_than_the_model_reads_are_cut(tmp_path: Path) -> None:
    write_tiny("mimo", tmp_path / "model", dtype="F32", max_position_embeddings=16)
    write_data(tmp_path / "model", tmp_path / "data", random_records(20), random_records(4))
    watch = StopAt(1)
    trained(tmp_path, tmp_path / "run", watch, **SHORT)
    assert any("cut to the longest length" in text for text in watch.said)


def test_a_run_that_is_stopped_leaves_no_thread_of_tensorboard(
    inputs: Path, tmp_path: Path
) -> None:
    """Regression: its writer went on, and failed where the folder was removed later."""
    pytest.importorskip("tensorboard")
    before = set(threading.enumerate())
    trained(inputs, tmp_path / "run", StopAt(1))
    assert any((tmp_path / "run" / "tensorboard").iterdir())
    assert set(threading.enumerate()) <= before


def test_boards_have_validations_and_no_step_twice(inputs: Path, tmp_path: Path) -> None:
    """A killed run's events behind its last checkpoint made TensorBoard complain on resuming."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = tmp_path / "run"
    trained(inputs, run, StopAt(5))
    (run / "checkpoints" / "step-00000005.safetensors").unlink()  # as if killed before it
    trained(inputs, run)
    found = events.EventAccumulator(str(run / "tensorboard"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorBoard's own
        found.Reload()
    assert len(list((run / "tensorboard").iterdir())) == 1
    lines = metrics(run)
    assert [event.step for event in found.Scalars("loss")] == [
        line["step"] for line in lines if "loss" in line
    ]
    tags = found.Tags()["scalars"]
    assert [event.step for event in found.Scalars("validation/acceptance_length")] == [
        line["step"] for line in lines if "validation" in line
    ]
    assert "validation/by_category/odd/cumulative_acceptance/depth_2" in tags


def test_heads_are_ranked_and_one_that_did_not_learn_is_told() -> None:
    def outcome(name: str, best: int, length: float) -> Outcome:
        before, after = (
            {"acceptance_length": found, "cumulative_acceptance": [found - 1]}
            for found in (1.5, length)
        )
        return Outcome(name, f"run/{name}", True, 9, 9, best, before, after)

    idle, good = outcome("idle", 0, 1.5), outcome("good", 6, 1.75)
    told = "training did not help: the result is the head as it was"
    assert told in describe(idle) and told not in describe(good)
    assert [line.split()[:2] for line in ranking([idle, good])] == [["1.", "good"], ["2.", "idle"]]


def test_what_is_validated_is_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masters are fp32, the head is stored in bf16: the best step must be best as it is served."""
    seen: list[dict[str, torch.Tensor]] = []
    masters: list[dict[str, torch.Tensor]] = []

    def spy(learners: list[Learner], *given: Any, **settings: Any) -> list[Validation]:
        seen.append({n: p.detach().clone() for n, p in learners[0].parameters.items()})
        return validate(learners, *given, **settings)

    def copied(run: HeadRun, found: Validation) -> None:
        masters.append({n: p.detach().clone() for n, p in run.learner.parameters.items()})
        judge(run, found)

    inputs, judge = write_inputs(tmp_path, "BF16"), HeadRun.judge
    monkeypatch.setattr(trainer, "validate", spy)
    monkeypatch.setattr(HeadRun, "judge", copied)
    trained(inputs, tmp_path / "run", dtype="float32", **SHORT)
    steps = [line["step"] for line in metrics(tmp_path / "run") if "validation" in line]
    training = training_of(tmp_path / "run" / "head")
    assert training is not None
    best = steps.index(training["step"])
    written = values(open_head(tmp_path / "run" / "head"))
    stock = head_of(Checkpoint.open(inputs / "model"))
    config = model_config(Config(dict(stock.config)).fields)
    tried, wide = (split_parameters(p[best], config, written) for p in (seen, masters))
    assert all(torch.equal(value.float(), written[name].float()) for name, value in tried.items())
    assert best > 0 and any(not torch.equal(wide[name], tried[name]) for name in wide)
