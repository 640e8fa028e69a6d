"""Two results held against each other."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bench_documents import document

from headstart.bench import statistics
from headstart.bench.diff import diff
from headstart.bench.document import read_document
from headstart.errors import DataError


def verdicts(found: dict[str, Any]) -> dict[str, str]:
    return {cell["variant"]: cell["figures"]["tpot_seconds"]["verdict"] for cell in found["cells"]}


def test_the_same_result_has_not_changed() -> None:
    found = diff(document(), document())
    assert found["num_worse"] == found["num_better"] == 0 and found["paired"]
    assert verdicts(found) == {"K=0": "noise", "K=3": "noise"}


def test_a_change_of_all_requests_is_no_noise_and_has_a_direction() -> None:
    assert verdicts(diff(document(), document(1.05))) == {"K=0": "worse", "K=3": "worse"}
    assert verdicts(diff(document(1.05), document())) == {"K=0": "better", "K=3": "better"}


RESULTS, CELLS, REQUESTS, REPEATS = 120, 6, 12, 3


def noisy_result(seed: int, slowness: float = 1.0) -> dict[str, Any]:
    """What `diff` reads of one: every answer takes as long as it likes."""
    random = np.random.default_rng(seed)
    cells = []
    for cell in range(CELLS):
        answers = [
            {
                "id": f"q{i}", "repeat": repeat, "output_tokens": 40,
                "ttft_seconds": random.lognormal(-2, 0.2),
                "tpot_seconds": slowness * random.lognormal(-4, 0.15),
                "latency_seconds": slowness * random.lognormal(0, 0.15),
            }
            for i in range(REQUESTS) for repeat in range(REPEATS)
        ]  # fmt: skip
        means = {name: {"mean": np.mean([a[name] for a in answers])} for name in LATENCIES}
        speed = 40 * len(answers) / sum(a["latency_seconds"] for a in answers)
        cells.append({
            "variant": f"K={cell}", "task": None, "concurrency": 1, "rate": None,
            "speculation": None, "requests": answers,
            "measures": {"output_tokens_per_second": speed, **means},
        })  # fmt: skip
    empty: dict[str, Any] = {"environment": {}, "workload": {}, "model": None, "is_valid": True}
    return {**empty, "cells": cells}


LATENCIES = ("ttft_seconds", "tpot_seconds")


def test_many_figures_raise_no_more_false_alarms_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two results of one thing: at most 8 % have a figure that is surely worse, though by their
    own intervals many have one. Control: a real change is seen, and only where it is."""
    monkeypatch.setattr(statistics, "NUM_DRAWS", 100)  # the same method, quicker
    found = [diff(noisy_result(2 * i), noisy_result(2 * i + 1)) for i in range(RESULTS)]
    assert np.mean([one["num_surely_worse"] > 0 for one in found]) <= 0.08
    assert np.mean([one["num_worse"] > 0 for one in found]) > 0.2
    slower = diff(noisy_result(0), noisy_result(1, slowness=1.3))
    assert slower["num_figures"] == 3 * CELLS and slower["num_surely_worse"] >= CELLS
    assert not any(cell["figures"]["ttft_seconds"]["sure"] for cell in slower["cells"])
    faster = diff(noisy_result(1, slowness=1.3), noisy_result(0))
    assert faster["num_surely_worse"] == 0 and faster["num_surely_better"] >= CELLS


def test_results_of_other_questions_are_two_samples() -> None:
    found = diff(document(), document(1.01, seed=1))
    assert not found["paired"] and found["settings"]["workload: seed"] == [0, 1]
    ratio = found["cells"][0]["figures"]["tpot_seconds"]["ratio"]
    assert ratio["paired"] is False and ratio["noise"] is True


def test_what_only_one_result_has_is_named() -> None:
    old, new = document(), copy.deepcopy(document())
    new["cells"][1]["variant"] = "K=5"
    found = diff(old, new)
    assert [cell["variant"] for cell in found["only_in_first"]] == ["K=3"]
    assert [cell["variant"] for cell in found["only_in_second"]] == ["K=5"]


def test_a_document_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(document()))
    assert verdicts(diff(read_document(path), read_document(tmp_path))) == {
        "K=0": "noise", "K=3": "noise",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "cannot be read"), ("[]", "no result"), ('{"format": "x"}', "no result"),
     ('{"format": "headstart-bench", "version": 99}', "version 99")],
)  # fmt: skip
def test_what_is_no_result_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        read_document(path)
