"""What is said at the end of distilling."""

from __future__ import annotations

from typing import Any

from headstart.data.dataset import Header
from headstart.distill.run import Outcome


def advice(*, num_cut: int = 0, num_heldout: int = 1, acceptance: Any = None) -> list[str]:
    dropped = {"truncated": {"count": num_cut}} if num_cut else {}
    header = Header(
        origin="engine", trunk_digest="", tokenizer_sha="", template_sha="", vocab_size=9,
        hidden_size=8, sampling={"max_tokens": 512}, seed=0, chat_template_kwargs={},
        counts={"train": {"records": 9}, "heldout": {"records": num_heldout}},
        report={"answers": 10, "dropped": dropped},
    )  # fmt: skip
    return Outcome(header, 10, acceptance).advice


def test_nothing_is_said_of_a_good_run() -> None:
    good = {"drafted": [10, 9], "acceptance_length": 2.1}
    assert advice(num_cut=2, acceptance=good) == []


def test_many_answers_that_were_cut_off_are_told() -> None:
    (note,) = advice(num_cut=3)
    assert note.startswith("3 of 10 answers were cut off at --max-tokens 512 and dropped.")


def test_a_head_whose_drafts_are_never_right_is_told() -> None:
    (note,) = advice(acceptance={"drafted": [10, 9], "acceptance_length": 1.01})
    assert "(acceptance length 1.01)" in note and "--speculate 0 answers faster" in note
    assert advice(acceptance={"drafted": [0, 0], "acceptance_length": 1.0}) == [], "none were made"


def test_that_nothing_is_held_out_is_told() -> None:
    (note,) = advice(num_heldout=0)
    assert "raise --heldout" in note
