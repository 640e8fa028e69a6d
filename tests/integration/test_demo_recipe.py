"""The recipe of the demo's head, from prompts to a folder to ship, on a tiny model."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.long_runs import long_only

from headstart.calibrate.tiny import write_tiny
from headstart.data.dataset import Dataset
from headstart.heads.formats import open_head

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "demo_head" / "recipe.py"
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    write_tiny("mimo", folder / "model", dtype="F32", vocab_size=2500, **SIZES)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    prompts = [
        {"prompt": f"t{2 + i} t{3 + 5 * i}", "category": "ab"[i % 2], "source": "made"}
        for i in range(40)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    questions = [{"question_id": i, "category": "c", "turns": [f"t{i} t9", "t4"]} for i in (5, 6)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    return folder


def recipe(place: Path, *stages: str) -> None:
    """The program in this process, with the fewest steps that it trains."""
    words = [
        str(RECIPE), *stages, "--model", "model", "--prompts", "prompts.jsonl",
        "--questions", "questions.jsonl", "--work", "work", "--out", "head", "--home", "home",
        "--small", "--seconds", "stock=0", "study=0", "final=0",
    ]  # fmt: skip
    known = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(RECIPE.parent)
        patch.setattr(sys, "argv", words)
        patch.setattr(importlib.import_module("training"), "_PROBE_STEPS", 2)
        try:
            runpy.run_path(str(RECIPE), run_name="__main__")
        finally:
            for path in RECIPE.parent.glob("*.py"):  # names that anybody might use
                if path.stem not in known:
                    sys.modules.pop(path.stem, None)


@pytest.fixture(scope="module")
def done(place: Path) -> Path:
    """The place after the whole recipe; made by every process that runs some of these tests."""
    recipe(place, "all")
    return place


@long_only
def test_the_recipe_runs_from_prompts_to_a_head_to_ship(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe(place, "all")
    work = place / "work"
    study = json.loads((work / "study.json").read_text())
    rows = {(row["options"]["context"], row["options"]["loss"]) for row in study}
    assert len(rows) == 10
    rates = {row["options"]["learning_rate"] for row in study if row["name"] == "fastmtp"}
    assert 5e-5 in rates and len(rates) > 1  # as published, and searched like every other row
    assert len((work / "study-steps.txt").read_text().split()) == 1
    closer = json.loads((work / "closer.json").read_text())
    assert {row["seed"] for row in closer} == {0, 1}
    scores = [json.loads(line) for line in (work / "scores.jsonl").read_text().splitlines()]
    assert {line["set"] for line in scores} == {
        "held-out, T=0.6", "held-out, T=0", "MT-Bench, T=0",
    }  # fmt: skip
    assert {"stock", "fastmtp", "final"} <= {line["head"] for line in scores}
    head = open_head(place / "head")
    assert {source.dtype for source in head.tensors.values()} == {"BF16"}
    card = (place / "head" / "README.md").read_text()
    assert "| made | not stated | 40 |" in card and "| final | MT-Bench, T=0 |" in card
    assert not (place / "head" / "tokenizer.json").exists()
    written = json.loads((place / "head" / "headstart.json").read_text())  # no folders of a machine
    assert [source["path"] for source in written["sources"]] == ["final/head"]
    assert written["command"] == "recipes/demo_head/recipe.py publish"
    assert {path.name for path in (place / "home").iterdir()} == {"head.tar.gz", "results.tar.gz"}
    assert "stage publish" in capsys.readouterr().out


@long_only
def test_what_is_scored_was_never_trained_on(done: Path) -> None:
    place = done
    heldout = (place / "work" / "evaluation" / "heldout.jsonl").read_text().splitlines()
    scored = {json.loads(line)["id"] for line in heldout}
    answers = Dataset.open(place / "work" / "answers")
    asked = {record.prompt_id for record in answers.records("heldout")}
    trained = {record.prompt_id for record in answers.records("train")}
    assert scored & asked and trained  # they were answered for training, too, and kept out of it
    assert not scored & trained


@long_only
def test_parts_are_joined_to_what_one_process_writes(done: Path) -> None:
    place = done
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(RECIPE.parent)
        answers, settings = (importlib.import_module(name) for name in ("answers", "settings"))
        try:
            # Two parts, one after the other: the way there and back is what may go wrong.
            patch.setattr(answers, "side_by_side", lambda do, items, processes: map(do, items))
            one = settings.Settings(
                work=Path("work"), prompts=Path("prompts.jsonl"), questions=None, model="model",
                device="cpu",
            )  # fmt: skip
            one = settings.small(one)
            answers.make_answers(replace(one, work=Path("again"), processes=2))
        finally:
            for path in RECIPE.parent.glob("*.py"):
                sys.modules.pop(path.stem, None)
    assert _answers(place / "again") == _answers(place / "work") != {}


@long_only
def test_heads_dealt_out_to_processes_are_those_of_one(done: Path) -> None:
    place = done
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(RECIPE.parent)
        training, settings = (importlib.import_module(name) for name in ("training", "settings"))
        try:
            patch.setattr(training, "side_by_side", lambda do, items, processes: map(do, items))
            one = settings.small(
                settings.Settings(
                    work=Path("work"), prompts=Path("prompts.jsonl"), questions=None,
                    model="model", device="cpu",
                )
            )  # fmt: skip
            heads = {
                f"{rate:g}": training.base_options(one, optimizer="muon", learning_rate=rate)
                for rate in (1e-2, 2e-2)
            }
            for processes in (1, 2):
                dealt = replace(one, processes=processes)
                training.trained(dealt, Path(f"dealt-{processes}"), heads, steps=2)
        finally:
            for path in RECIPE.parent.glob("*.py"):
                sys.modules.pop(path.stem, None)
    weights = {
        path.parts[-3]: path.read_bytes() for path in place.glob("dealt-1/*/head/head.safetensors")
    }
    again = {
        path.parts[-3]: path.read_bytes()
        for path in place.glob("dealt-2/part-*/*/head/head.safetensors")
    }
    assert again == weights and len(set(weights.values())) == 2


def test_another_training_k_must_be_clearly_better(place: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(RECIPE.parent)
        final = importlib.import_module("final")
        try:
            row = {"seed": 0, "options": {}}
            patch.setattr(final, "best_of_rows", lambda _: [{**row, "name": "usual"}])
            patch.setattr(final, "read", lambda *_: [{**row, "name": "other"}])
            for other, chosen in ((2.005, "usual"), (2.02, "other")):
                patch.setattr(final, "lengths", lambda _, x=other: {"usual": 2.0, "other": x})
                assert final.best_row(None)["name"] == chosen
        finally:
            for path in RECIPE.parent.glob("*.py"):
                sys.modules.pop(path.stem, None)


def _answers(work: Path) -> dict[str, list[int]]:
    records = Dataset.open(work / "answers").records("train")
    return {record.id: record.ids.tolist() for record in records}


def test_a_score_that_is_missing_is_the_only_one_made(
    done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = done
    capsys.readouterr()
    scores = place / "work" / "scores.jsonl"
    lines = scores.read_text().splitlines(keepends=True)
    scores.write_text("".join(lines[:1] + lines[2:]))
    recipe(place, "score")
    assert capsys.readouterr().out.count(" at K = 3") == 1
    assert sorted(scores.read_text().splitlines(keepends=True)) == sorted(lines)


@long_only
def test_a_finished_stage_is_not_done_again(done: Path) -> None:
    place = done
    metrics = place / "work" / "study" / "prefix-kl-0.01" / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns
    recipe(place, "evaluation", "study")
    assert metrics.stat().st_mtime_ns == before


def test_processes_side_by_side_give_everything_and_a_dead_one_is_noticed() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(RECIPE.parent)
        try:
            parallel = importlib.import_module("parallel")
            side_by_side = parallel.side_by_side
            # What each process does first must not import torch there, which takes seconds.
            patch.setattr(parallel, "torch", SimpleNamespace(set_num_threads=abs))
            assert sorted(side_by_side(abs, [-3, 1, -2], 2)) == [1, 2, 3]
            with pytest.raises(BrokenProcessPool):
                list(side_by_side(os._exit, [1], 2))
        finally:
            sys.modules.pop("parallel", None)
