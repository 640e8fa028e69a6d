"""--overwrite replaces runs, nothing else, and not before the new one has begun."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.commands import headstart
from support.long_runs import one_of_each
from support.training_runs import StopAt, flags, job, metrics, trained, weights, write_inputs

from headstart.errors import CheckpointError, HeadstartError, TrainError
from headstart.files import write_whole
from headstart.train.replacing import Replaced
from headstart.train.trainer import Trainer, train
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import write as write_vocab

SHORT = {"epochs": 1, "eval_every": 4}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def finished(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    trained(inputs, run, **SHORT)
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def content(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


def test_what_cannot_begin_leaves_the_old_run(inputs: Path, run: Path, tmp_path: Path) -> None:
    """A vocabulary that could not be read: head, report and checkpoints were gone."""
    before = content(run)
    bad = tmp_path / "vocab.json"
    bad.write_text("{}")
    with pytest.raises(HeadstartError, match="vocab"):
        trained(inputs, run, overwrite=True, draft_vocab=str(bad), **SHORT)
    assert content(run) == before


@pytest.mark.parametrize("failing", ["validate", "save"])
def test_a_run_that_fails_before_its_first_checkpoint_gives_the_old_one_back(
    failing: str, inputs: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(run)

    def fails(self: Trainer) -> None:
        raise TrainError("out of memory")

    monkeypatch.setattr(Trainer, failing, fails)
    with pytest.raises(TrainError, match="out of memory"):
        trained(inputs, run, overwrite=True, seed=3, **SHORT)
    assert content(run) == before


@pytest.mark.parametrize("given", ["data", "head", "cache", "draft_vocab"])
def test_inputs_in_the_runs_own_folder_are_refused(given: str, inputs: Path, run: Path) -> None:
    """--data run/data --out run --overwrite deleted the dataset."""
    inside, whole = run / given, job(inputs, run, overwrite=True, **SHORT)
    if given == "data":
        shutil.copytree(inputs / "data", inside)
        whole = replace(whole, data=inside)
    elif given == "head":
        whole = replace(whole, head=inside)
    else:
        inside = inside.with_suffix(".json")
        write_vocab([DraftVocab(ids=(1, 2), vocab_size=128)], inside)
        own = replace(whole.shared, **{given: str(inside)})
        whole = replace(whole, options={"": own})
    before = content(run)
    with pytest.raises(TrainError, match="lies in the run's own folder"):
        train(whole)
    assert content(run) == before


def test_a_folder_with_some_other_options_is_no_run(inputs: Path, tmp_path: Path) -> None:
    """Any JSON object called options.json made a folder one that could be deleted."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "options.json").write_text('{"options": {"colour": "red"}}')
    (mine / "letter.txt").write_text("dear")
    before = content(mine)
    for overwrite in (False, True):
        with pytest.raises(TrainError, match=r"is no run .*\"headstart_run\": 1"):
            trained(inputs, mine, overwrite=overwrite)
    assert content(mine) == before


def test_only_what_a_run_wrote_is_replaced(inputs: Path, run: Path) -> None:
    (run / "notes.txt").write_text("mine")
    first = weights(run)
    trained(inputs, run, overwrite=True, seed=3, **SHORT)
    assert weights(run) != first and (run / "notes.txt").read_text() == "mine"
    assert not (run / ".replaced").exists()


@pytest.mark.parametrize("moment", one_of_each(3, range(12)))
def test_a_kill_while_replacing_leaves_what_the_same_command_takes(
    moment: int, inputs: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    left = moment

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return function(*arguments, **more)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Replaced, "put_back", lambda self: None)  # as after a kill
        patch.setattr("headstart.train.replacing.os.rename", deadly(os.rename))
        patch.setattr("headstart.train.run_folder.write_whole", deadly(write_whole))
        patch.setattr("headstart.train.replacing.shutil.rmtree", deadly(shutil.rmtree))
        try:
            trained(inputs, run, StopAt(1), overwrite=True, seed=3, **SHORT)
        except Killed:
            names = {path.name for path in [*run.iterdir(), *run.glob(".replaced/*")]}
            assert "checkpoints" in names, "nothing is lost before the new run has begun"
    trained(inputs, run, StopAt(2), overwrite=True, seed=3, **SHORT)
    assert json.loads((run / "options.json").read_text())["options"]["seed"] == 3
    assert [line["step"] for line in metrics(run)][-1] == 2
    assert not (run / ".replaced").exists() and not (run / "head").exists()


def test_a_second_overwriting_does_not_lose_what_the_first_was_to_replace(
    inputs: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first was killed before its first checkpoint; the second one fails."""
    before = content(run)

    def fails(self: Trainer) -> None:
        raise TrainError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "validate", fails)
        patch.setattr(Replaced, "put_back", lambda self: None)
        with pytest.raises(TrainError):
            trained(inputs, run, overwrite=True, seed=3, **SHORT)
    assert not (run / "head").exists()
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "validate", fails)
        with pytest.raises(TrainError):
            trained(inputs, run, overwrite=True, seed=4, **SHORT)
    assert content(run) == before


def test_a_first_file_that_a_kill_tore_does_not_block_the_folder(
    inputs: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".options.json.partial").write_text('{"opt')
    trained(inputs, tmp_path / "run", StopAt(1), **SHORT)
    begun = json.loads((tmp_path / "run" / "options.json").read_text())
    assert begun["headstart_run"] == 1
    assert not (tmp_path / "run" / ".options.json.partial").exists()


def test_a_run_inside_a_file_is_refused(inputs: Path, tmp_path: Path) -> None:
    """Regression: a file that is not there was to be removed."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file is not a folder: choose another --out"):
        trained(inputs, tmp_path / "file" / "run", StopAt(1), **SHORT)


def test_another_content_of_the_draft_vocabulary_is_refused(inputs: Path, tmp_path: Path) -> None:
    """Only the file's name was compared."""
    file, run = tmp_path / "vocab.json", tmp_path / "run"
    write_vocab([DraftVocab(ids=tuple(range(0, 128, 2)), vocab_size=128)], file)
    trained(inputs, run, StopAt(1), draft_vocab=str(file), **SHORT)
    file.unlink()
    write_vocab([DraftVocab(ids=tuple(range(1, 128, 2)), vocab_size=128)], file)
    with pytest.raises(TrainError, match=r"another draft vocabulary \(its ids differ\)"):
        trained(inputs, run, draft_vocab=str(file), **SHORT)


def test_the_command_line_loses_nothing_by_a_bad_vocabulary(inputs: Path, run: Path) -> None:
    before = content(run)
    words = ["train", str(inputs / "model"), "--data", str(inputs / "data"), "--out", str(run)]
    result = headstart(*words, *flags(**SHORT), "--overwrite", "--draft-vocab", "none.json")
    assert result.returncode == 1 and "none.json" in result.stderr
    assert content(run) == before
