"""Two results held against each other."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from bench_documents import document

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
