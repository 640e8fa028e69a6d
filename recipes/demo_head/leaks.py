"""Training passages that share text with held-out ones, found exactly by an index of runs of words.

Packages copy from each other and from themselves: a manual as pages and as one text, a function in
two releases. Near-duplicates are dropped when passages are collected, but that finds only some.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from kinds import TRAIN, split_of
from overlap import runs_of, words_of
from passages import Passage

_RUN = 8  # words
_SHARE = 0.2  # of the runs of the shorter one of two passages


def without_leaks(passages: Sequence[Passage]) -> list[Passage]:
    """Without training passages of which a fifth is in one held-out passage, or the reverse."""
    splits = [split_of(passage.split_key) for passage in passages]
    index: dict[tuple[str, ...], list[int]] = defaultdict(list)
    counts: dict[int, int] = {}
    for place, passage in enumerate(passages):
        if splits[place] != TRAIN:
            runs = _runs(passage)
            counts[place] = len(runs)
            for run in runs:
                index[run].append(place)
    kept = [
        passage
        for passage, split in zip(passages, splits, strict=True)
        if split != TRAIN or not _is_leak(_runs(passage), index, counts)
    ]
    dropped, num_train = len(passages) - len(kept), len(passages) - len(counts)
    print(
        f"passages: {len(counts)} held out; {dropped} of {num_train} others shared more than "
        f"{_SHARE:.0%} of their runs of {_RUN} words with one of them and were dropped", flush=True,
    )  # fmt: skip
    return kept


def _is_leak(
    runs: set[tuple[str, ...]], index: dict[tuple[str, ...], list[int]], counts: dict[int, int]
) -> bool:
    common = Counter(place for run in runs for place in index.get(run, ()))
    return any(number > _SHARE * min(len(runs), counts[place]) for place, number in common.items())


def _runs(passage: Passage) -> set[tuple[str, ...]]:
    """A text with fewer words is one run."""
    words = words_of(passage.text)
    return set(runs_of(words, min(_RUN, len(words)))) if words else set()
