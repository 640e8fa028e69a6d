"""Draft vocabularies for a model: answers counted, sizes tried on held-out ones, the best taken.

Counting needs a tokenizer only. The model is loaded where held-out answers and a head are there to
predict speeds with (`vocab_speed.py`), after everything that can be refused without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headstart.checkpoint.reader import Checkpoint
from headstart.data.dataset import Dataset
from headstart.data.fingerprints import ABSENT, tokenizer_sha
from headstart.data.prompt_reader import PromptReader
from headstart.data.records import Record
from headstart.errors import ConfigError, DataError, some, tokenizer_faults
from headstart.files import read_text, why_unreadable
from headstart.vocab import making, ranking
from headstart.vocab.draft_vocab import ALL, DraftVocab
from headstart.vocab.files import read
from headstart.vocab.forced import forced_ids
from headstart.vocab.languages import language_of
from headstart.vocab.own_tokens import check_limit
from headstart.vocab.sizes import candidate_sizes, check_sizes

if TYPE_CHECKING:
    from headstart.backends.options import Weights

_MOST_TEXT_BYTES = 1 << 30
BY = ("language", "category", "none")
Named = TypeVar("Named", making.Group, DraftVocab)
# Passes the records through while they are counted; the command line shows a bar meanwhile.
Shown = Callable[[Sequence[Record]], Iterable[Record]]


@dataclass(frozen=True, kw_only=True)
class VocabOptions:
    """What is counted, how it is cut into maps, and the engine whose speed decides on sizes."""

    data: Path | None = None
    texts: Sequence[Path] = ()
    by: str = "language"
    sizes: tuple[int, ...] = ()  # empty: candidates by the size of the model's vocabulary
    min_tokens: int = 1000
    only: str | None = None  # the one map that is made
    own: int = 0  # tokens of its text that a request will draft beside a map
    head: Path | None = None
    bandwidth: float | None = None
    weights: Weights = "as-dtype"
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.data is None and not self.texts:
            raise ConfigError("nothing to count; give --data, --text or both.")
        check_by(self.by)
        if self.own != 0:
            check_limit(self.own)


def check_by(by: str) -> None:
    if by not in BY:
        raise ConfigError(f"--by is {by!r}; expected one of {', '.join(BY)}.")


def make_maps(
    checkpoint: Checkpoint, options: VocabOptions, *, shown: Shown = lambda records: records
) -> tuple[list[making.Made], list[str]]:
    """A map for each group of answers that is large enough, and notes on the others."""
    dataset = None if options.data is None else Dataset.open(options.data)  # before a tokenizer
    prompts = PromptReader(checkpoint)
    tokenizer = prompts.tokenizer
    if tokenizer is None:
        raise DataError(f"{checkpoint.folder} has no tokenizer, which a draft vocabulary needs.")
    vocab_size = int(checkpoint.config.get("vocab_size", 0))
    with tokenizer_faults(checkpoint.folder):
        forced = frozenset(i for i in forced_ids(tokenizer, prompts.end_ids) if i < vocab_size)
    model = making.Model(
        vocab_size=vocab_size, tokenizer_sha=tokenizer_sha(checkpoint), forced=forced,
        languages=options.by == "language", own=options.own,
    )  # fmt: skip
    sizes = options.sizes or candidate_sizes(vocab_size, len(forced))
    check_sizes(sizes, vocab_size, len(forced))
    group_of = {
        "language": ranking.by_language(prompts.decode),
        "category": ranking.by_category,
        "none": ranking.together,
    }[options.by]
    train, heldout = _answers(dataset, model)
    counts = [ranking.count(shown(train), group_of), *_text_counts(options, prompts)]
    groups, notes = making.grouped(
        ranking.merged(*counts), heldout, group_of, min_tokens=options.min_tokens
    )
    chosen = only_named(groups, options.only)
    simulate = _predictor(checkpoint, options, sizes, heldout) if heldout else None
    made, more = making.make_all(chosen, groups, model, sizes, simulate)
    return made, [*notes, *more, *(each.note for each in made if each.note is not None)]


def only_named(there: Sequence[Named], only: str | None) -> list[Named]:
    """Those with the name that was asked for, or all; ConfigError where there is none."""
    found = [each for each in there if only in (None, each.name)]
    if not found:
        raise ConfigError(f"--only is {only!r}; there are {some((v.name for v in there), 8)}.")
    return found


def converted(source: Path, checkpoint: Checkpoint) -> list[DraftVocab]:
    """The maps of a file, with what its format does not say filled in from the model."""
    sha = tokenizer_sha(checkpoint)
    known: dict[str, Any] = {
        "vocab_size": int(checkpoint.config.get("vocab_size", 0)),
        "tokenizer_sha": None if sha == ABSENT else sha,
    }
    vocabs = read(source)
    for vocab in vocabs:
        vocab.check(**known, where=str(source))
    return [replace(vocab, **known) for vocab in vocabs]


def _predictor(
    checkpoint: Checkpoint, options: VocabOptions, sizes: Sequence[int], heldout: Sequence[Record]
) -> making.Simulate | None:
    from headstart.predict.vocab_speed import predictor_of  # imports torch

    return predictor_of(
        checkpoint, options.head, options.device, options.dtype, options.bandwidth,
        options.weights, sizes, heldout, own=options.own,
    )  # fmt: skip


def _answers(dataset: Dataset | None, model: making.Model) -> tuple[list[Record], list[Record]]:
    if dataset is None:
        return [], []
    dataset.header.check(tokenizer_sha=model.tokenizer_sha or "", vocab_size=model.vocab_size)
    return list(dataset.records("train")), list(dataset.records("heldout"))


def _text_counts(options: VocabOptions, prompts: PromptReader) -> list[Any]:
    encoded = partial(prompts.encode, add_special_tokens=False)
    counts = []
    for path in options.texts:
        label = path.stem if options.by == "category" else ALL
        group = language_of if options.by == "language" else label
        counts.append(ranking.count_text(_text(path), encoded, group))
    return counts


def _text(path: Path) -> str:
    try:
        return read_text(path, _MOST_TEXT_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read ({why_unreadable(error)}). Give a text file in UTF-8."
        ) from error
