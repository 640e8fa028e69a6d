"""The statistics of drafting that an answer carries."""

from __future__ import annotations

from collections import Counter

from headstart.engine.output import Completion, Result
from headstart.engine.stats import RequestStats
from headstart.server.answers.statistics import statistics_of


def test_statistics_add_up_over_samples_and_name_the_usual_k() -> None:
    outputs = []
    for index, rounds in enumerate([[(3, 2), (3, 0), (1, 1)], [(0, 0)]]):
        stats = RequestStats(Counter(rounds), first_token_seconds=0.5, total_seconds=1.5, seed=7)
        outputs.append(Completion(index, [1, 2, 3], "", "stop", None, [], None, stats))
    found = statistics_of([Result("a", [1, 2], outputs)])
    assert (found["draft_tokens"], found["accepted_tokens"]) == (7, 3)
    assert found["accepted_per_depth"] == [2, 1, 0] and found["rounds"] == 4
    assert found["acceptance_length"] == 1.75 and found["chosen_k"] == 3
    assert found["tokens_per_second"] == 4 and found["time_to_first_token_seconds"] == 0.5
