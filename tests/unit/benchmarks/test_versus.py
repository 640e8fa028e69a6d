"""The comparison with vLLM: plan, figures, the check of answers, and a run of ours alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from versus.gaps import Arrivals
from versus.measure import Sizes, Turns, speeds
from versus.plan import Group, Stage, parse_plan
from versus.process import Failed, Worker, settings_of
from versus.report import page
from versus.worker import Desk, Wrong

from headstart.calibrate.calibrated import write_calibrated

ROOT = Path(__file__).parents[3]
CYCLE = [0, 1, 3, 4, 5, 2]  # what follows each token: 2 to 5 in a ring


class Walker:
    """An engine that needs no model: two tokens of the ring per step, or a wrong one."""

    def __init__(self, wrong_at: int | None = None):
        self._wrong_at, self._open = wrong_at, dict[str, tuple[int, int]]()

    def add(self, name: str, prompt: list[int], tokens: int) -> None:
        self._open[name] = (prompt[-1], tokens)

    def step(self) -> list[tuple[str, list[int]]]:
        found = []
        for name, (token, left) in list(self._open.items()):
            text = []
            for _ in range(min(2, left)):
                token, left = CYCLE[token], left - 1
                text.append(2 if left == self._wrong_at and token != 2 else token)
            self._open[name] = (token, left)
            found.append((name, text))
        return [chunk for chunk in found if chunk[1]]

    def abort(self, names: list[str]) -> None:
        for name in names:
            del self._open[name]


def desk(tmp_path: Path, driver: Any) -> Desk:
    (tmp_path / "cycle.json").write_text(json.dumps(CYCLE))
    settings = {"cycle": str(tmp_path / "cycle.json"), "active": 4, "max_model_len": 400}
    return Desk(driver, settings)


def test_a_plan_says_what_is_measured_in_which_order() -> None:
    assert parse_plan("3:80,off1,long;0:1") == [
        Group(3, (Stage("answer", 80), Stage("off", 1), Stage("long"))),
        Group(0, (Stage("answer", 1),)),
    ]
    assert parse_plan("3:first,first300") == [Group(3, (Stage("first"), Stage("first", 1, 300)))]


@pytest.mark.parametrize("text", ["", "1,80", "3:many", "3:0", "0:off1", "0:vocab"])
def test_a_plan_that_cannot_be_run_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--plan"):
        parse_plan(text)


def test_gaps_count_where_they_overlap_the_time_asked_for() -> None:
    seen = Arrivals()
    seen.chunks["a"] = [(0.0, [1]), (1.0, [1]), (4.0, [1, 1, 1]), (5.0, [1]), (9.0, [1])]
    found = seen.gaps(["a"], 2.0, 4.5)
    assert found is not None
    assert (found["chunks"], found["tokens"]) == (2, 4)
    assert found["chunk_max_seconds"] == 3.0 and found["chunk_p50_seconds"] == 2.0
    assert found["token_mean_seconds"] == 1.0
    assert seen.gaps([], 2.0, 4.5) is None


def test_answers_are_checked_against_the_cycle(tmp_path: Path) -> None:
    job = {"kind": "first", "prompt": 5, "tokens": 9, "seed": 1}
    found = desk(tmp_path, Walker()).do(job)
    assert found["tokens_per_step"] == 2 and found["first_token_seconds"] > 0
    with pytest.raises(Wrong, match="the cycle says"):
        desk(tmp_path, Walker(wrong_at=3)).do(job)


def test_a_long_prompt_is_timed_beside_decoding_requests(tmp_path: Path) -> None:
    job = {"kind": "long", "prompt": 5, "long": 50, "decoding": 2, "seed": 1}
    found = desk(tmp_path, Walker()).do(job)
    assert found["quiet"]["tokens"] == 2 * found["quiet"]["chunks"] > 60
    assert found["during"]["chunks"] >= 2 and found["long_first_token_seconds"] > 0


def test_engines_are_asked_until_two_repeats_agree() -> None:
    """One compiles at first, one is warm, one never comes to rest."""
    times = {"a": [9.0, 2.0, 2.01], "b": [1.0, 1.0], "c": [float(2**i) for i in range(6)]}
    asked = {name: 0 for name in times}

    class Asked:
        def __init__(self, name: str):
            self.name = name

        def ask(self, kind: str, *, tokens: int, **_: Any) -> dict[str, Any]:
            if tokens < 40:  # a warm-up
                return {}
            asked[self.name] += 1
            return {"seconds": times[self.name][asked[self.name] - 1], "acceptance": []}

    turns = Turns([Asked(name) for name in times])
    found = speeds(turns, Sizes(10, 40, 3, 0, (), agree=0.01), 1)
    assert asked == {"a": 3, "b": 2, "c": 6}
    assert found["a"]["value"] == pytest.approx(20, rel=0.01) and found["b"]["value"] == 40
    assert [found[name]["is_settled"] for name in times] == [True, True, False]


def test_who_fails_drops_out_and_the_others_go_on() -> None:
    class Named:
        def __init__(self, name: str):
            self.name = name

    order = []

    def ask(worker: Any, repeat: int) -> dict[str, Any]:
        order.append(worker.name)
        if worker.name == "b" and repeat == 1:
            raise Failed("out of memory")
        return {"seconds": repeat}

    turns = Turns([Named("a"), Named("b"), Named("c")])
    found = turns.ask(3, ask)
    assert order == ["a", "b", "c", "c", "b", "a", "a", "c"]
    assert sorted(found) == ["a", "c"] and turns.failures == ["b: out of memory"]


def test_no_engine_gets_the_replies_of_another(tmp_path: Path) -> None:
    """A restarted engine once read the file of the first one: figures of another job."""
    settings = {**settings_of("headstart", "/bin/true", {}), "drafts": 3}
    for _ in range(2):
        worker = Worker("headstart", settings, tmp_path)
        with pytest.raises(Failed, match="headstart ended with 0"):
            worker.started()
        worker.stop()
        for reply in tmp_path.glob("*.jsonl"):
            reply.write_text('{"number": 0, "made_at": 1, "ready_at": 2}\n')


def test_an_engine_that_says_nothing_is_ended(tmp_path: Path) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\necho is loading\nexec sleep 60\n")
    sleeper.chmod(0o755)
    settings = {**settings_of("vllm", str(sleeper), {}), "drafts": 0, "patience": 0.3}
    worker = Worker("vllm", settings, tmp_path)
    with pytest.raises(Failed, match="vllm said nothing for 0 s:\nis loading"):
        worker.started()
    assert not worker.is_running


@pytest.mark.usefixtures("quick_processes")
def test_a_run_is_written_down(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "found.json"
    shape = "layers=1,hidden=64,intermediate=64,heads=2,kv_heads=1,vocab=32"
    write_calibrated(shape, 0.8, model, active=24, dtype="F32")
    command = [
        sys.executable, str(ROOT / "benchmarks/gpu_vs_vllm.py"), str(model), "--plan",
        "2:2,off1,first;0:1", "--start-all", "--engines", "headstart", "--skip-logits",
        "--prompt", "9", "--answer",
        "12", "--kv-gib", "0.01", "--repeats", "2", "--work",
        str(tmp_path / "logs"), "--out", str(out),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    assert [row["stage"] for row in document["rows"]] == ["answer", "off", "first", "answer"]
    assert [row["k"] for row in document["rows"]] == [2, 2, 2, 0]
    assert all(len(row["engines"]["headstart"]["all"]) == 2 for row in document["rows"][:2])
    assert [start["k"] for start in document["starts"]] == [2, 0] and not document["failures"]
    assert document["starts"][0]["start_seconds"] > 0
    assert page([document]) in done.stdout
