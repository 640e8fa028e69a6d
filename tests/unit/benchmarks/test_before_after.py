"""Two work trees in turns: verdicts, and whole runs with trees that hold a toy instead of us."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trees.comparing import FINE, SLOWER, UNCLEAR, compare
from trees.process import Failed
from trees.workload import Workload

ROOT = Path(__file__).parents[3]
# Answers with the numbers that follow the prompt, after SECONDS; SHIFT makes another text.
TOY = """
import time
from types import SimpleNamespace as Made

class SamplingParams:
    def __init__(self, *, max_tokens, **others):
        self.max_tokens = max_tokens

class Engine:
    def __init__(self, model, **options):
        print("a library that talks on standard output")
        self.notes, self.stats = ["a toy"], Made(preemptions=0)

    def generate(self, prompts, params):
        time.sleep(SECONDS)
        return [self._answer(prompt, params.max_tokens) for prompt in prompts]

    def _answer(self, prompt, tokens):
        ids = [(prompt[-1] + step + SHIFT) % 90 for step in range(tokens)]
        stats = Made(first_token_seconds=SECONDS, acceptance=Made(length=1.0))
        return Made(outputs=[Made(token_ids=ids)], stats=stats)
"""
TORCH = """
from types import SimpleNamespace as Made

__version__ = "0"
cuda = Made(is_available=lambda: False)
get_num_threads = lambda: 1
"""


def make_tree(folder: Path, seconds: float, shift: int = 0) -> Path:
    (folder / "headstart").mkdir(parents=True)
    toy = TOY.replace("SECONDS", str(seconds)).replace("SHIFT", str(shift))
    (folder / "headstart" / "__init__.py").write_text(toy)
    (folder / "torch.py").write_text(TORCH)
    return folder


def compared(tmp_path: Path, old: Path, new: Path, *more: str) -> tuple[int, dict[str, Any]]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 90}))
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "before_after.py"), "--old", str(old), "--new",
         str(new), str(model), "--drafts", "0", "--requests", "1,2", "--prompt", "8", "--answer",
         "5", "--turns", "3", "--work", str(tmp_path / "work"), "--out", str(out), *more],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout, done.stderr
    document: dict[str, Any] = json.loads(out.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == document
    return done.returncode, document


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        ([101, 99, 102, 100, 98], FINE),
        ([90, 91, 89, 90, 92], SLOWER),
        ([80, 96, 97, 120, 99], UNCLEAR),
    ],
    ids=["as fast", "slower in every turn", "slower in some turns"],
)
def test_the_verdict_needs_a_slower_median_and_turns_that_agree(
    new: list[float], verdict: str
) -> None:
    assert compare([100, 100, 100, 100, 100], new)["verdict"] == verdict


def test_a_ratio_above_one_is_a_faster_new_tree_for_speeds_and_for_times() -> None:
    assert compare([10.0, 10.0], [20.0, 20.0])["ratio"] == 2
    assert compare([10.0, 10.0], [5.0, 5.0], is_time=True)["ratio"] == 2


def test_answers_are_held_against_the_cycle() -> None:
    workload = Workload("/models/made", range(2, 6), 4, [0, 1, 3, 4, 5, 2])
    workload.check("new", [[2, 3]], [[4, 5, 2]], 3)
    with pytest.raises(Failed, match="new: token 1 is 4; the cycle says 5"):
        workload.check("new", [[2, 3]], [[4, 4, 2]], 3)
    with pytest.raises(Failed, match="2 tokens instead of 3"):
        workload.check("new", [[2, 3]], [[4, 5]], 3)


def test_two_trees_take_turns_and_the_slower_one_is_found(tmp_path: Path) -> None:
    old, new = make_tree(tmp_path / "old", 0.02), make_tree(tmp_path / "new", 0.2)
    code, document = compared(tmp_path, old, new, "--starts", "1")
    assert code == 1 and not document["failures"]
    speeds = [row for row in document["rows"] if row["kind"] == "speed"]
    assert [row["requests"] for row in speeds] == [1, 2]
    assert all(row["verdict"] == SLOWER and row["differing_answers"] == 0 for row in speeds)
    assert [row["kind"] for row in document["rows"]] == ["speed", "speed", "start"]
    assert document["trees"]["old"]["source_sha256"] != document["trees"]["new"]["source_sha256"]
    assert {engine["tree"] for engine in document["engines"]} == {"old", "new"}
    assert not list(old.rglob("__pycache__")), "a tree was written to"


def test_texts_that_differ_are_counted_and_fail_the_run(tmp_path: Path) -> None:
    old, new = make_tree(tmp_path / "old", 0.02), make_tree(tmp_path / "new", 0.02, shift=1)
    code, document = compared(tmp_path, old, new)
    assert code == 1
    assert [row["differing_answers"] for row in document["rows"]] == [3, 6]
    assert "3 of 3 answers differ" in document["failures"][0]


def test_a_tree_that_fails_is_reported_with_its_own_words(tmp_path: Path) -> None:
    old, new = make_tree(tmp_path / "old", 0.02), make_tree(tmp_path / "new", 0.02)
    package = new / "headstart" / "__init__.py"
    package.write_text(package.read_text().replace('["a toy"]', "1 / 0"))
    code, document = compared(tmp_path, old, new)
    assert code == 1 and not document["rows"]
    assert "K = 0: new: ZeroDivisionError" in document["failures"][0]
