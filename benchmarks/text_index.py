"""What the index of a long text costs: processor time and bytes for each of its tokens.

PYTHONPATH=. python3 benchmarks/text_index.py [--tokens 100000] [--text FILE ...]

Texts of several kinds, at once as a prompt comes, and one token at a time as an answer does, with a
look for what could be copied behind each. `--text`: files whose words count as tokens.
"""

from __future__ import annotations

import argparse
import random
import re
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

from headstart.copying.index import TextIndex

_VOCAB = 50_000


def texts(count: int, files: list[Path]) -> Iterator[tuple[str, list[int]]]:
    numbers = random.Random(0)

    def unlike(size: int) -> list[int]:
        return [numbers.randrange(_VOCAB) for _ in range(size)]

    yield "unlike each other", unlike(count)
    phrases, made = [unlike(numbers.randrange(2, 12)) for _ in range(4000)], list[int]()
    while len(made) < count:
        made += phrases[min(int(numbers.paretovariate(0.8)), len(phrases)) - 1]
    yield "phrases that come again", made[:count]
    begin, made = unlike(count // 20), list[int]()
    while len(made) < count:
        made += [token if numbers.random() < 0.99 else _VOCAB for token in begin]
    yield "20 versions of a text", made[:count]
    yield "two tokens", [numbers.randrange(2) for _ in range(count)]
    yield "a loop of five", ([1, 2, 3, 4, 5] * count)[:count]
    if files:
        known: dict[str, int] = {}
        words = re.findall(r"\w+|\s+|[^\w\s]", "".join(path.read_text() for path in files))
        yield "words of files", [known.setdefault(word, len(known)) for word in words][:count]


def seconds(text: list[int], *, each: bool) -> float:
    index, began = TextIndex(), time.thread_time()
    for part in ([token] for token in text) if each else [text]:
        index.extend(part)
        index.match()
    return (time.thread_time() - began) / len(text)


def num_bytes(text: list[int]) -> float:
    tracemalloc.start()
    index = TextIndex(text)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held / len(index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--text", type=Path, nargs="*", default=[])
    args = parser.parse_args()
    print("| text | tokens | us each, at once | us each, one by one | bytes each |")
    print("|---|---|---|---|---|")
    for name, text in texts(args.tokens, args.text):
        once, each = (1e6 * seconds(text, each=each) for each in (False, True))
        print(f"| {name} | {len(text)} | {once:.2f} | {each:.2f} | {num_bytes(text):.0f} |")


if __name__ == "__main__":
    main()
