"""Counts of a request's tokens are those of its lists, whenever they are asked for."""

from __future__ import annotations

import random

from headstart.sampling.history import History


def test_counts_follow_the_output() -> None:
    draw = random.Random(0)
    prompt = [draw.randrange(40) for _ in range(30)]
    history, output = History(prompt), list[int]()
    for length in (0, 1, 3, 60, 2):
        new = [draw.randrange(100) for _ in range(length)]
        history.add(new)
        output += new
        ids, counts = history.counts
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {
            token: output.count(token) for token in {*prompt, *output}
        }
        assert history.num_output == len(output)


def test_a_request_without_a_prompt_can_be_counted() -> None:
    ids, counts = History.of([], [7, 7]).counts
    assert (ids.tolist(), counts.tolist()) == ([7], [2])
