"""`headstart distill` with the embedded engine: exact, resumable, stopped at any moment."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import SCRIPTS
from support.commands import headstart
from support.distill_runs import ENGINE, OPTIONS, chat_model, contents, run, write_prompts
from support.tiny_fixture import Tiny

from headstart.checkpoint.reader import Checkpoint
from headstart.data.dataset import Dataset
from headstart.data.journal import read_journal
from headstart.data.prompt_reader import PromptReader
from headstart.data.records import Record
from headstart.engine.engine import Engine
from headstart.errors import CheckpointError, DataError, WriteFailed
from headstart.models.build import build
from headstart.sampling.params import SamplingParams
from headstart.simulate.plan import make_plan
from headstart.simulate.rates import Rates
from headstart.simulate.scoring import WHOLE, score

FLAGS = [
    "--temperature", "1", "--top-k", "0", "--top-p", "1", "--max-tokens", "40", "--heldout", "0.3",
    "--seed", "3", "--max-repetition", "1", "--dtype", "float64", "--device", "cpu",
    "--kv-bytes", str(ENGINE["kv_bytes"]),
]  # fmt: skip
SLOW = SCRIPTS / "slow_distill.py"


@pytest.fixture(scope="module")
def model(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tiny, tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "asked.jsonl")


@pytest.fixture(scope="module")
def whole(model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "data"
    run(model, prompts, out)
    return out


def test_a_recorded_seed_gives_the_recorded_answer_whatever_is_drafted(
    model: Path, whole: Path
) -> None:
    dataset = Dataset.open(whole)
    records = dataset.records("train") + dataset.records("heldout")
    engine = Engine(model, **ENGINE, speculate=0)
    for record in records:
        prompt, answer = record.ids[: record.num_prompt], record.ids[record.num_prompt :]
        params = SamplingParams(**record.sampling, seed=record.seed)
        (result,) = engine.generate([prompt.tolist()], params)
        assert result.outputs[0].token_ids == answer.tolist()
        assert record.mask.tolist() == [False] * len(prompt) + [True] * len(answer)
        assert record.ids[-1] in (1, 10, 20, 30, 40)  # the end token that the model chose
    others = [SamplingParams(**record.sampling, seed=(record.seed or 0) + 1) for record in records]
    asked = [record.ids[: record.num_prompt].tolist() for record in records]
    changed = [r.outputs[0].token_ids for r in engine.generate(asked, others)]
    assert changed != [record.ids[record.num_prompt :].tolist() for record in records]  # control
    assert {record.turn for record in records} == {0, 1}
    assert len({record.seed for record in records}) == len(records)


def test_simulator_equals_engine_where_the_engines_own_length_was_the_limit(
    model: Path, tmp_path: Path
) -> None:
    """max_model_len is shorter than the model's and than --max-tokens: fewer drafts fit in."""
    out, many = tmp_path / "d", write_prompts(tmp_path / "many.jsonl", 40)
    outcome = run(
        model, many, out, engine={"max_model_len": 24, "speculate": 3}, heldout=1.0,
        keep_truncated=True, min_answer_tokens=0, max_similarity=1.0, seed=0,
    )  # fmt: skip
    assert not outcome.header.report["dropped"], "all answers are to be compared"
    records = Dataset.open(out).records("heldout")
    assert all(record.max_tokens == 24 - record.num_prompt for record in records)
    assert {record.finish_reason for record in records} == {"stop", "length"}
    built = build(Checkpoint.open(model), device="cpu", dtype="float64")
    end_ids = PromptReader(Checkpoint.open(model)).end_ids

    def counters(given: list[Record]) -> dict[str, Any]:
        plan = make_plan(given, None, "match")
        assert plan.method == "replay"
        found = score(built, given, plan, max_drafts=3, end_ids=end_ids)[WHOLE].overall.found
        assert isinstance(found, Rates)
        return found.walked[3].as_json()

    assert outcome.acceptance is not None and outcome.acceptance["accepted"][1] > 0
    assert counters(records) == outcome.acceptance
    # Control: without the limit that the engine had, rounds near the end would draft more.
    unknown = [replace(record, max_tokens=None) for record in records]
    assert counters(unknown)["drafted"] != outcome.acceptance["drafted"]


def test_the_engines_precision_is_recorded_and_not_mixed(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "d"
    header = run(model, prompts, out, limit=6).header
    assert header.engine == {"dtype": "float64", "weights": "as-dtype", "device": "cpu"}
    with pytest.raises(DataError, match="begun with dtype 'float64', this run has 'float32'"):
        run(model, prompts, out, engine={"dtype": "float32"})
    assert run(model, prompts, out).num_new > 0


def test_the_second_turn_is_asked_with_the_models_own_answer(whole: Path) -> None:
    _, answers = read_journal(whole / "journal.jsonl")
    by_key = {answer.key: answer for answer in answers}
    seconds = [answer for answer in answers if answer.turn == 1]
    assert seconds
    for second in seconds:
        first = by_key[second.prompt_id, 0, 0]
        said = [*first.prompt_ids, *first.answer_ids[:-1]]  # its end is the template's to write
        assert list(second.prompt_ids[: len(said)]) == said
        number = int(second.prompt_id[1:])
        assert list(second.prompt_ids[len(said) :]) == [1, 5, 2, 12 + number, 3]


def test_a_prompt_and_all_its_answers_are_in_one_split(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    run(model, prompts, tmp_path / "d", samples=3)
    dataset = Dataset.open(tmp_path / "d")
    sides = [{r.prompt_id for r in dataset.records(split)} for split in ("train", "heldout")]
    assert sides[0] and sides[1]
    assert not sides[0] & sides[1]
    samples = {r.sample for r in dataset.records("train")}
    assert samples == {0, 1, 2}


def test_running_again_asks_nothing_and_writes_the_same(
    model: Path, prompts: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, journal = contents(whole), (whole / "journal.jsonl").read_bytes()
    stamp = Dataset.open(whole).header.stamp
    monkeypatch.setattr(Engine, "__init__", None)  # none may be started
    outcome = run(model, prompts, whole)
    assert outcome.num_new == 0
    assert contents(whole) == before
    assert outcome.header.stamp == stamp, "a run that was begun with the dataset goes on"
    assert (whole / "journal.jsonl").read_bytes() == journal


def test_more_prompts_and_samples_are_added_to_what_is_there(
    model: Path, prompts: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "d"
    assert run(model, prompts, out, limit=4).num_new < run(model, prompts, out).num_new
    assert contents(out) == contents(whole)
    few = len(contents(out)["train"])
    assert run(model, prompts, out, samples=2).num_new > 0
    assert len(contents(out)["train"]) > few


def test_other_filters_need_no_new_answers(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "d"
    run(model, prompts, out, max_tokens=8, keep_truncated=True)
    kept = len(contents(out)["train"])
    outcome = run(model, prompts, out, max_tokens=8)
    assert outcome.num_new == 0
    assert len(contents(out)["train"]) < kept
    assert outcome.header.report["dropped"]["truncated"]["count"] > 0


def test_many_answers_that_were_cut_off_are_told_and_what_to_do(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "d"
    (told,) = (n for n in run(model, prompts, out, max_tokens=8).advice if "cut off" in n)
    assert "at --max-tokens 8 and dropped" in told and "--keep-truncated" in told
    again = run(model, prompts, out, max_tokens=8, keep_truncated=True)
    assert not any("cut off" in note for note in again.advice)


@pytest.mark.parametrize(
    ("changes", "found"),
    [({"seed": 4}, "was begun with seed 3, this run has 4"),
     ({"temperature": 0}, "was begun with sampling"),
     ({"chat_template_kwargs": {"x": 1}}, "was begun with chat_template_kwargs"),
     ({"as_given": True}, "was begun with origin 'engine'")],
    ids=["seed", "sampling", "template", "origin"],
)  # fmt: skip
def test_going_on_in_another_way_is_refused(
    changes: dict[str, Any], found: str, model: Path, prompts: Path, whole: Path
) -> None:
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    with pytest.raises(DataError, match=found):
        run(model, prompts, whole, **changes)
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == before


def test_greedy_answers_are_those_of_the_engine(model: Path, prompts: Path, tmp_path: Path) -> None:
    run(model, prompts, tmp_path / "d", temperature=0, keep_truncated=True, max_similarity=1)
    records = Dataset.open(tmp_path / "d").records("train")
    engine = Engine(model, **ENGINE, speculate=0)
    for record in records:
        ids = record.ids.tolist()
        params = SamplingParams(temperature=0, max_tokens=OPTIONS["max_tokens"])
        (result,) = engine.generate([ids[: record.num_prompt]], params)
        assert result.outputs[0].token_ids == ids[record.num_prompt :]


def test_prompts_that_do_not_fit_are_reported_and_the_others_answered(
    model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "long.jsonl"
    long = " ".join(["t9"] * 300)
    path.write_text(f'{{"prompt": "{long}", "id": "long"}}\n{{"prompt": "t8", "id": "brief"}}\n')
    engine = {"max_model_len": 200}
    outcome = run(model, path, tmp_path / "d", engine=engine, keep_truncated=True)
    report = outcome.header.report
    assert report["kept"] == 1
    assert "the prompt has 30" in report["refused"]["examples"]["long"]


@pytest.mark.usefixtures("quick_processes")
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT], ids=str)
def test_a_stopped_run_goes_on_without_asking_twice(
    stop: signal.Signals, model: Path, prompts: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "d"
    arguments = ["distill", str(model), "--prompts", str(prompts), "--out", str(out), *FLAGS]
    process = subprocess.Popen(
        [sys.executable, str(SLOW), "0.05", *arguments, "--max-running-requests", "3"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    journal = out / "journal.jsonl"
    deadline = time.monotonic() + 60
    # A header and four answers, the last of which a signal in the middle of its line takes back.
    while not journal.exists() or journal.read_bytes().count(b"\n") < 5:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(stop)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    if stop == signal.SIGINT:
        assert process.returncode == 130
        assert "Run the same command again to go on" in errors
    _, before = read_journal(journal)
    if stop == signal.SIGINT:
        assert f"interrupted: {len(before)} answers so far" in errors
    assert 3 <= len(before) < 16
    with pytest.raises(DataError, match="not finished"):
        Dataset.open(out)
    outcome = run(model, prompts, out)
    _, after = read_journal(journal)
    assert after[: len(before)] == before
    assert len(after) == len(before) + outcome.num_new == len({a.key for a in after})
    assert contents(out) == contents(whole)


def test_the_command_prints_a_summary(
    model: Path, prompts: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "d"
    command = (str(model), "--prompts", str(prompts), "--out", str(out), *FLAGS)
    planned = headstart("distill", *command, "--dry-run")
    assert planned.stdout == "12 prompts, 16 answers to ask for at most, 0 known already\n"
    assert not out.exists()
    made = headstart("distill", *command)
    assert made.returncode == 0, made.stderr
    assert "drafting  acceptance length" in made.stdout
    assert made.stdout.endswith(f"wrote {out}\n")
    assert contents(out) == contents(whole)
    document = json.loads(headstart("distill", *command, "--json").stdout)
    assert document["new_answers"] == 0
    assert document["counts"] == Dataset.open(out).header.counts


def test_a_folder_that_is_no_dataset_is_left_alone(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(DataError, match="exists and is no dataset"):
        run(model, prompts, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_bad_input_leaves_nothing_behind(
    model: Path, prompts: Path, tiny: Tiny, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "t5"}\n{oops\n')
    out = tmp_path / "d"
    with pytest.raises(DataError, match="broken lines: line 2: not JSON"):
        run(model, broken, out)
    with pytest.raises(DataError, match="no chat template"):
        run(tiny("llama", with_head=False), prompts, out)
    with pytest.raises(CheckpointError, match="does not exist"):
        run(model, prompts, out, head=tmp_path / "no-such-head")
    assert not out.exists()


def test_a_run_that_keeps_nothing_says_why(model: Path, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no answer to keep \(\d+ truncated.*raise --max-tokens"):
        run(model, prompts, tmp_path / "d", max_tokens=1, min_answer_tokens=0)
    assert (tmp_path / "d" / "journal.jsonl").is_file()


def test_an_out_that_cannot_be_made_is_said_before_a_model_is_loaded(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(Engine, "__init__", None)  # none may be started
    with pytest.raises(CheckpointError, match=r"file is not a folder: choose another --out"):
        run(model, prompts, tmp_path / "file" / "d")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(WriteFailed, match=r"cannot write .*an --out that you may write to"):
        run(model, prompts, tmp_path / "d")


def test_a_dataset_is_never_overwritten(model: Path, prompts: Path, whole: Path) -> None:
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    command = (str(model), "--prompts", str(prompts), "--out", str(whole), *FLAGS)
    result = headstart("distill", *command, "--overwrite")
    assert result.returncode == 2
    assert "adds to a dataset and never replaces one" in result.stderr
    assert f"another --out, or remove {whole}" in result.stderr
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == before


def test_everything_held_out_is_told(model: Path, prompts: Path, tmp_path: Path) -> None:
    (told,) = (n for n in run(model, prompts, tmp_path / "d", heldout=1.0).advice if "train" in n)
    assert told.startswith("nothing is left to train on") and "lower --heldout" in told
