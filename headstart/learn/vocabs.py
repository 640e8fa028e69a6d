"""The draft vocabulary that is served, counted again on what was collected.

It keeps its size. Tokens that texts hold come in, the most frequent first; tokens that they do not
hold and that come late in the vocabulary make room. Beside every head lies the list that serves
with it, and that takes its place together with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.learn.folder import START, Folder
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import read, write

if TYPE_CHECKING:
    from headstart.data.records import Record

FILE = "draft_vocab.json"  # in the folder of a head


def served_vocab(path: Path | None) -> DraftVocab | None:
    """The one map of a file; None where there is none, or one for each of several languages."""
    found = read(path) if path is not None else []
    return found[0] if len(found) == 1 else None


def vocab_beside(head: Path) -> DraftVocab | None:
    """What serves with a head; None where drafts come from no list, or one for each language."""
    path = head / FILE
    return served_vocab(path) if path.is_file() else None


def running_vocab(given: Path | None, head: Path | None, *, renews: bool) -> DraftVocab | None:
    """What the engine drafts from while this head serves: the list beside the head, where lists are
    swapped with heads, else what the server was started with."""
    if given is None:
        return None
    # It may lie beside a learned head, and go with that one while the server runs.
    first = served_vocab(given) if given.is_file() else None
    if given.is_file() and (first is None or not renews):
        return first
    own = vocab_beside(head) if head is not None else None
    return own or first or served_vocab(given)


def first_vocab(folder: Folder, serving: Path, given: Path) -> Path:
    """The file that a server begins with: what was learned from the given list, where it is the one
    that was given before; else the given one, which then lies beside every head."""
    vocab = served_vocab(given)
    if vocab is None:
        return given
    before = vocab_beside(folder.heads / START)
    if before is not None and before.ids == vocab.ids:
        if (serving / FILE).is_file():
            return serving / FILE
        write_vocab(vocab, serving)
        return given
    # The list beside START says which one was given. A kill before the last write leaves none
    # there, so that the next start writes all of them again, whichever list it is given.
    start = folder.heads / START
    (start / FILE).unlink(missing_ok=True)
    others = {path.parent for path in folder.heads.glob(f"*/{FILE}")} | {serving}
    for head in [*sorted(others - {start}), start]:
        write_vocab(vocab, head)
    return given


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
    """Beside the head that it serves with."""
    write([vocab], head / FILE, overwrite=True)
