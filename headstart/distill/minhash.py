"""Near-duplicates among texts: MinHash signatures, cut into bands, candidates compared exactly.

Two texts whose sets of shingles have a Jaccard similarity s agree in one band with probability
s ** ROWS, so one of BANDS agrees nearly surely for the similarities that matter; what only looks
alike is sorted out by computing the similarity itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headstart.sampling.params import mix64

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WIDTH = 12  # bytes of a shingle: two or three English words, four Chinese characters
BANDS, ROWS = 16, 4
_ODD = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Text:
    """A question and its answer; answers to one question (`group`) are compared by themselves."""

    question: str
    answer: str
    group: str


def near_duplicates(texts: Sequence[Text], similarity: float) -> dict[int, int]:
    """Place of a text that is too similar -> place of the earlier one that it is similar to."""
    import numpy as np

    buckets: dict[tuple[int, bytes], list[int]] = {}
    found: dict[int, int] = {}
    for place, text in enumerate(texts):
        own = shingles(f"{text.question}\n{text.answer}")
        if not len(own):
            continue
        bands = np.ascontiguousarray(signature(own).reshape(BANDS, ROWS))
        keys = [(number, band.tobytes()) for number, band in enumerate(bands)]
        candidates = sorted({other for key in keys for other in buckets.get(key, ())})
        twin = next((c for c in candidates if _similar(text, texts[c], own) >= similarity), None)
        if twin is not None:
            found[place] = twin
            continue
        for key in keys:
            buckets.setdefault(key, []).append(place)
    return found


def jaccard(first: NDArray[np.uint64], second: NDArray[np.uint64]) -> float:
    """The share of shingles that both have, of those that either has."""
    import numpy as np

    both = len(np.intersect1d(first, second, assume_unique=True))
    either = len(first) + len(second) - both
    return both / either if either else 1.0


def shingles(text: str) -> NDArray[np.uint64]:
    """Hashes of all runs of WIDTH bytes, each once; case and white space do not count."""
    import numpy as np

    data = np.frombuffer(" ".join(text.casefold().split()).encode("utf-8", "replace"), np.uint8)
    if not len(data):
        return np.zeros(0, np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(data, min(WIDTH, len(data)))
    powers = np.array([pow(_ODD, i + 1, 1 << 64) for i in range(windows.shape[1])], np.uint64)
    hashes = np.zeros(len(windows), np.uint64)
    for column, power in enumerate(powers):
        hashes += windows[:, column] * power
    return np.unique(_mixed(hashes))


def signature(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The smallest value of each of BANDS * ROWS hash functions."""
    import numpy as np

    # The hashes are mixed already: multiplying by an odd number is another order of them.
    factors = np.array([mix64(i * _ODD + 1) | 1 for i in range(BANDS * ROWS)], np.uint64)
    return np.array([(hashes * factor).min() for factor in factors], np.uint64)


def _similar(text: Text, other: Text, own: NDArray[np.uint64]) -> float:
    if text.group == other.group:  # the question is the same: it must not speak for the answers
        return jaccard(shingles(text.answer), shingles(other.answer))
    return jaccard(own, shingles(f"{other.question}\n{other.answer}"))


def _mixed(words: NDArray[np.uint64]) -> Any:
    """`mix64` on an array."""
    import numpy as np

    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
