"""The draft vocabulary that is served, counted again on what was collected.

It keeps its size. Tokens that texts hold come in, the most frequent first; tokens that they do not
hold and that come late in the vocabulary make room. The demo takes it at its next start; to
other models it is given by `--draft-vocab`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import read, write

if TYPE_CHECKING:
    from headstart.data.records import Record

FILE = "draft_vocab.json"  # in the folder of a learned head


def served_vocab(path: Path | None) -> DraftVocab | None:
    """The one map of a file; None where there is none, or one for each of several languages."""
    found = read(path) if path is not None else []
    return found[0] if len(found) == 1 else None


def renewed(served: DraftVocab, records: Iterable[Record]) -> DraftVocab:
    """The same number of ids, those of these answers first."""
    counts: Counter[int] = Counter()
    for record in records:
        counts.update(record.ids[record.mask].tolist())
    size = len(served.ids)
    ids = {token for token, _ in counts.most_common(size)}
    for token in served.ids:  # ascending: common tokens have low ids
        if len(ids) >= size:
            break
        ids.add(token)
    return replace(served, ids=tuple(sorted(ids)), coverage=None)


def write_vocab(vocab: DraftVocab, head: Path) -> None:
    """Beside the head that it was checked with."""
    write([vocab], head / FILE, overwrite=True)
