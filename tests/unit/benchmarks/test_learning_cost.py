"""What is measured beside a learner is not learned from before."""

from __future__ import annotations

from learning_cost import in_rounds
from learning_kinds import Asked


def test_no_request_is_in_two_rounds_and_each_round_has_every_kind() -> None:
    asked = [Asked(kind, f"{kind} {number}") for number in range(6) for kind in "abc"]
    rounds = in_rounds(asked[:-1], 3)
    assert [len(part) for part in rounds] == [5, 5, 5]
    assert len({each.text for part in rounds for each in part}) == 15
    assert all({each.kind for each in part} == set("abc") for part in rounds)
