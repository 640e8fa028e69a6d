"""The wider recipe of the demo's head, from passages to a folder to ship, on a tiny model."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest
from support.long_runs import long_only

from headstart.calibrate.tiny import write_tiny
from headstart.data.dataset import Dataset
from headstart.heads.formats import open_head

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "demo_head" / "wide.py"
# Something stands before a user's turn, which the model is to write.
TEMPLATE = "t7 {% for message in messages %}{{ message.content }} {% endfor %}"
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
SETS = {
    "held-out, T=0.6", "held-out, T=0", "MT-Bench, T=0", "summary, T=0", "answer, T=0",
    "translation, T=0", "code-task, T=0",
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_tiny("mimo", tmp_path / "model", dtype="F32", vocab_size=2500, **SIZES)
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    ends = {"eos_token_id": list(range(0, 2500, 8))}  # so that turns end by themselves
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(ends))
    prompts = [{"prompt": f"t{2 + i} t{3 + 5 * i}", "category": "ab"[i % 2]} for i in range(40)]
    _write(tmp_path / "prompts.jsonl", prompts)
    questions = [
        {"question_id": i, "category": "c", "turns": [f"t9 t{7 * i}"]} for i in range(5, 25)
    ]
    _write(tmp_path / "questions.jsonl", questions)
    return tmp_path


def _write(path: Path, lines: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_passages(place: Path) -> None:
    """Of nonsense that the tiny tokenizer knows; the scripts' modules are importable here."""
    import collect
    from passages import Passage

    found = []
    for i in range(1500):
        words = " ".join(f"t{(i * 7 + j * j) % 2000}" for j in range(20))
        is_code = i % 5 == 0
        language = "python" if is_code else "en"
        found.append(Passage(f"{words} harbour harbour {i}", language, is_code, f"pkg{i % 4}"))
    collect.write_passages(place / "passages.jsonl.xz", found)


def run(place: Path, work: str, *words: str) -> None:
    """The program in this process."""
    common = [
        "--model", "model", "--device", "cpu", "--small", "--passages", "passages.jsonl.xz",
        "--prompts", "prompts.jsonl", "--questions", "questions.jsonl", "--work", work,
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(RECIPE.parent)
        patch.setattr(sys, "argv", [str(RECIPE), *words, *common])
        known = set(sys.modules)
        try:
            filters = importlib.import_module("own_questions")
            patch.setattr(filters, "fault_of", _empty)  # the tiny model has no words
            if not (place / "passages.jsonl.xz").exists():
                write_passages(place)
            runpy.run_path(str(RECIPE), run_name="__main__")
        finally:
            for path in RECIPE.parent.glob("*.py"):  # names that anybody might use
                if path.stem not in known:
                    sys.modules.pop(path.stem, None)


def _empty(text: str, *, is_whole: bool = True) -> str | None:
    return None if text.strip() else "short"


@long_only
def test_text_is_made_carried_and_trained_on_elsewhere(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(place, "here", "evaluation", "text", "--home", "home", "--seconds", "answers=12")
    made = Dataset.open(place / "here" / "answers")
    samples = {record.sample for record in made.records("train")}
    assert {0, 1} <= samples, "greedy and another temperature"
    kinds = {record.category for record in made.records("train")}
    assert {"own", "dialogue", "summary", "code-task"} <= kinds, "questions and second turns, too"
    assert all(record.seed is None for record in made.records("train"))
    assert {record.sample for record in made.records("heldout")} == {0}
    asked = [json.loads(line) for line in (place / "here/prompts.jsonl").read_text().splitlines()]
    splits = {entry["id"]: entry["split"] for entry in asked}
    assert "test" not in splits.values()
    assert all(splits[r.prompt_id.partition("-then-")[0]] == "train" for r in made.records("train"))
    scored = [
        json.loads(line)["id"]
        for path in (place / "here" / "evaluation").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert scored and not splits.keys() & set(scored), "what is scored is never asked for training"

    (place / "there").mkdir()
    (place / "here" / "evaluation").rename(place / "there" / "evaluation")
    words = ["head", "--text", "home", "--out", "head", "--home", "back"]
    run(place, "there", *words, "--seconds", "begin=0", "long=9")
    again = Dataset.open(place / "there" / "answers")
    assert _ids(again) == _ids(made)
    lines = [json.loads(line) for line in (place / "there/scores.jsonl").read_text().splitlines()]
    assert {line["set"] for line in lines} == SETS and {line["head"] for line in lines} == {"final"}
    assert {s.dtype for s in open_head(place / "head").tensors.values()} == {"BF16"}
    card = (place / "head" / "README.md").read_text()
    assert "| final | translation, T=0 |" in card
    assert "packages: pkg0, pkg1, pkg2, pkg3 (not stated)." in " ".join(card.split())
    assert "Whether prompts were compared" in card, "sources.json was not carried along"
    assert max(len(line) for line in card.splitlines() if not line.startswith("|")) <= 120
    curve = json.loads((place / "there" / "curve.json").read_text())
    assert [point["run"] for point in curve][:1] == ["begin"] and curve[-1]["run"] == "long"
    assert {p.name for p in (place / "back").iterdir()} == {"head.tar.gz", "results.tar.gz"}
    times = [json.loads(line) for line in (place / "there/times.jsonl").read_text().splitlines()]
    assert [line["stage"] for line in times] == ["begin", "long", "curve", "score", "publish"]

    capsys.readouterr()
    run(place, "there", *words)  # everything is there
    assert " at K = 3" not in capsys.readouterr().out


def _ids(data: Dataset) -> dict[str, list[int]]:
    return {r.id: r.ids.tolist() for split in ("train", "heldout") for r in data.records(split)}


@long_only
def test_a_long_training_that_its_deadline_stops_leaves_a_head(place: Path) -> None:
    """Regression: the head of the finished training was published with the stopped one's scores."""
    with pytest.raises(SystemExit, match=r"has none to learn from.*the same command goes on"):
        run(place, "here", "evaluation", "text", "--seconds", "answers=0", "questions=1")
    run(place, "here", "text", "--seconds", "answers=20")
    options = ["--out", "head", "--option", "num_depths=2", "--seconds", "begin=0"]
    run(place, "here", "begin", "long", "score", "publish", *options, "long=0")
    assert not (place / "here" / "long" / "head").exists()
    written = json.loads((place / "here/stopped/head/headstart.json").read_text())["training"]
    assert written["stopped"] == 0 and written["num_depths"] == 2
    assert open_head(place / "head").tensors
    stopped, card = _scores(place), (place / "head" / "README.md").read_text()
    assert stopped.keys() == SETS and card.count("| final |") == len(SETS)
    assert "near a question of these files were removed: questions.jsonl" in " ".join(card.split())

    run(place, "here", "long", *options, "long=60")
    assert (place / "here" / "long" / "head").is_dir(), "another start goes on, and finishes"
    weights = place / "here" / "long" / "head" / "head.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1  # the tiny model's best head may be that of step 0 still
    weights.write_bytes(data)
    run(place, "here", "publish", *options)
    assert "not scored yet" in (place / "head" / "README.md").read_text()
    run(place, "here", "score", "publish", *options)
    finished = _scores(place)
    assert finished.keys() == SETS and len({line["digest"] for line in finished.values()}) == 1
    assert all(finished[name]["digest"] != stopped[name]["digest"] for name in SETS)
    assert (place / "head" / "README.md").read_text().count("| final |") == len(SETS)


def _scores(place: Path) -> dict[str, dict[str, object]]:
    """Lines by set; each is there once."""
    text = (place / "here" / "scores.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert len({line["set"] for line in lines}) == len(lines)
    return {line["set"]: line for line in lines}


def test_a_command_ends_in_time() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(RECIPE.parent)
        known = set(sys.modules)
        try:
            wide = importlib.import_module("wide")
            settings = wide.Wide(work=Path("work"), passages=None)
            seconds = settings.seconds
            for name, left, after, given in (
                ("answers", 2000.0, 1000.0, seconds["answers"]),
                ("answers", 700.0, 400.0, 300.0),  # what comes after keeps its time
                ("long", 2000.0, 100.0, 1900.0),  # takes all that is left
                ("long", 50.0, 100.0, 1.0),
                ("long", float("inf"), 100.0, seconds["long"]),
            ):
                assert wide._in_time(settings, name, left, after).seconds[name] == given
            later = ["answers", "begin", "long", "curve"]
            wanted = seconds["answers"] + seconds["begin"] + 300 + 100
            assert wide._seconds_of(settings, later) == wanted, "`long` does with less"
        finally:
            for path in RECIPE.parent.glob("*.py"):
                if path.stem not in known:
                    sys.modules.pop(path.stem, None)
