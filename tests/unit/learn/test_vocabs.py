"""Draft vocabularies that follow what is served: counted anew, checked, and taken with a head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.scripted_training import Scripted

from headstart.data.records import Record
from headstart.learn.folder import Folder
from headstart.learn.heads import START
from headstart.learn.loop import Base, LearningLoop
from headstart.learn.store import Store, TextWriter
from headstart.learn.texts import Text
from headstart.learn.vocabs import FILE, first_vocab, renewed, vocab_beside, write_vocab
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import write

SERVED = DraftVocab.of(range(10, 20), vocab_size=64, coverage=0.5)


def texts(answer: Sequence[int], count: int = 100) -> list[Text]:
    return [
        Text(id=f"t{i}", prompt=[i, 2], answer=[*answer], kind="a", time=float(i),
             finish_reason="stop") for i in range(count)
    ]  # fmt: skip


def records(*answers: Sequence[int]) -> list[Record]:
    return [texts(answer, 1)[0].record() for answer in answers]


def test_tokens_of_answers_come_in_and_rare_ones_make_room() -> None:
    found = renewed(SERVED, records([30, 30, 31], [12, 30]))
    assert found.ids == (*range(10, 18), 30, 31)
    assert found.coverage is None and (found.vocab_size, found.name) == (64, SERVED.name)


def test_prompts_do_not_count_and_the_size_stays() -> None:
    assert renewed(SERVED, records([12])).ids == SERVED.ids, "prompts hold 0 and 2"
    many = renewed(SERVED, records([*range(30, 60)], [*range(40, 50)]))
    assert many.ids == tuple(range(40, 50)), "the most frequent"


class Drafting(Scripted):
    """Drafts from a list that has `wanted` accept more or less than from the one before."""

    def __init__(self, wanted: int, more: float):
        super().__init__(gain=0.1)
        self._wanted, self._more, self.walked = wanted, more, list[tuple[int, ...]]()

    def walk_with(self, found: Sequence[Any], ids: Sequence[int], share: float) -> dict[str, Any]:
        self.walked.append(tuple(ids))
        level, self._level = self._level, self._level + self._more * (self._wanted in ids)
        try:
            return self.walk(found, share)
        finally:
            self._level = level

    def draft_from(self, ids: Sequence[int]) -> None:
        self.calls.append(f"draft from {len(ids)} with {self._wanted in ids}")
        self._level += self._more


@pytest.mark.parametrize("more", [0.2, 0.0, -0.2], ids=["better", "the same", "worse"])
def test_a_list_that_misses_served_tokens_is_rewritten_where_the_simulator_says_so(
    more: float, tmp_path: Path
) -> None:
    is_taken = more > 0
    with TextWriter(tmp_path) as writer:
        writer.add(texts([33] * 9))
    training, told = Drafting(33, more), list[tuple[str, Any]]()
    head = tmp_path / "0001"
    head.mkdir()
    ticks = iter(range(10**6))
    loop = LearningLoop(
        Store(tmp_path, 1 << 20), training, Base(), lambda: head,
        lambda name, facts: told.append((name, facts)), batch_tokens=20, least_seconds=3,
        clock=lambda: float(next(ticks)), vocab=SERVED,
    )  # fmt: skip
    while "offer" not in dict(told):
        assert loop.turn()
    assert [33 in ids and len(ids) == 10 for ids in training.walked] == [True]
    found = vocab_beside(head)
    assert found is not None and found.ids == (training.walked[0] if is_taken else SERVED.ids)
    assert ("vocab" in dict(told)) == is_taken
    loop.served(head)
    drafted = [call for call in training.calls if call.startswith("draft")]
    assert drafted == (["draft from 10 with True"] if is_taken else [])
    # What the serving head does from now on is what was walked with the list that came with it.
    serving = loop._checker._serving
    rounds = {(each.rounds, each.tokens) for each in serving.values()}
    level = training._level
    assert rounds == {(100, int(150 + 100 * level))}


def made(path: Path, vocab: DraftVocab) -> Path:
    write([vocab], path, overwrite=True)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    own = Folder(tmp_path / "learned")
    own.make(1.0)
    for name in (START, "0001", "0002"):
        (own.heads / name).mkdir()
    return own


def test_a_start_takes_what_was_learned_of_the_given_list(folder: Folder, tmp_path: Path) -> None:
    given = made(tmp_path / "given.json", SERVED)
    start, second = folder.heads / START, folder.heads / "0002"
    assert first_vocab(folder, start, given) == given, "nothing was learned yet"
    assert vocab_beside(start) == SERVED
    write_vocab(renewed(SERVED, records([33])), second)
    folder.known.touch()
    assert first_vocab(folder, second, given) == second / FILE
    assert first_vocab(folder, start, given) == start / FILE, "the head was taken back"
    assert folder.known.exists()


def test_another_list_than_before_is_taken_and_lies_beside_every_head(
    folder: Folder, tmp_path: Path
) -> None:
    start, second = folder.heads / START, folder.heads / "0002"
    first_vocab(folder, start, made(tmp_path / "given.json", SERVED))
    write_vocab(renewed(SERVED, records([33])), second)
    folder.known.touch()
    other = DraftVocab.of(range(5, 15), vocab_size=64)
    given = made(tmp_path / "other.json", other)
    assert first_vocab(folder, second, given) == given
    assert vocab_beside(start) == vocab_beside(second) == other
    assert vocab_beside(folder.heads / "0001") is None, "it had none"
    assert not folder.known.exists(), "what was known was drafted from another list"


def test_several_lists_are_left_as_they_are(folder: Folder, tmp_path: Path) -> None:
    both = [DraftVocab.of([1, 2], name=name, vocab_size=64) for name in ("de", "en")]
    write(both, tmp_path / "both.json")
    found = first_vocab(folder, folder.heads / START, tmp_path / "both.json")
    assert found == tmp_path / "both.json" and vocab_beside(folder.heads / START) is None
