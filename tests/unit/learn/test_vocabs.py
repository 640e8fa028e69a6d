"""Draft vocabularies that follow what is served: counted anew, checked, and taken with a head."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.scripted_training import Scripted

from headstart.data.records import Record
from headstart.learn.certainty import Walked
from headstart.learn.loop import Base, LearningLoop
from headstart.learn.store import Store, TextWriter
from headstart.learn.texts import Text
from headstart.learn.vocabs import renewed, vocab_beside, write_vocab
from headstart.vocab.draft_vocab import DraftVocab

SERVED = DraftVocab.of(range(10, 20), vocab_size=64, coverage=0.5)


def texts(answer: Sequence[int], count: int = 100, name: str = "t") -> list[Text]:
    return [
        Text(id=f"{name}{i}", prompt=[i, 2], answer=[*answer], kind="a", time=float(i),
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


def offered(
    training: Scripted, folder: Path, *, base: Base | None = None, vocab: DraftVocab = SERVED,
    renews: bool = True,
) -> tuple[LearningLoop, list[tuple[str, Any]], Path]:  # fmt: skip
    """A loop that has offered its first head, what it told, and where that head is."""
    with TextWriter(folder) as writer:
        writer.add(texts([33] * 9))
    told: list[tuple[str, Any]] = []
    head = folder / "0001"
    head.mkdir()
    ticks = itertools.count()
    loop = LearningLoop(
        Store(folder, 1 << 20), training, base or Base(), lambda: head,
        lambda name, facts: told.append((name, facts)), batch_tokens=20, least_seconds=3,
        clock=lambda: float(next(ticks)), vocab=vocab, renews_vocab=renews,
    )  # fmt: skip
    while "offer" not in dict(told):
        assert loop.turn()
    return loop, told, head


@pytest.mark.parametrize("more", [0.2, 0.0, -0.2], ids=["better", "the same", "worse"])
def test_a_list_that_misses_served_tokens_is_rewritten_where_the_simulator_says_so(
    more: float, tmp_path: Path
) -> None:
    is_taken = more > 0
    training = Drafting(33, more)
    loop, told, head = offered(training, tmp_path)
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


class Forgetting(Scripted):
    """A head and a list that each accept more of recent answers and less of the base."""

    def __init__(self, base: Sequence[Record], lost_by_list: float):
        super().__init__(gain=0.01)
        self._names = {record.id for record in base}
        self._lost_by_list, self._is_new_list = lost_by_list, False

    def walk(self, found: Sequence[Any], share: float) -> dict[str, Walked]:
        is_new = self._is_new_list
        lost = 0.009 * (share > 0 and self._level > 0) + self._lost_by_list * is_new
        gained = self._level * share + 1.0 * is_new
        lengths = {r.id: 2 - 2 * lost if r.id in self._names else 2 + gained for r in found}
        return {
            r.id: Walked(r.category, 10000, round(10000 * lengths[r.id]), 10000, 5000)
            for r in found
        }

    def walk_with(self, found: Sequence[Any], ids: Sequence[int], share: float) -> dict[str, Any]:
        self._is_new_list = 33 in ids
        try:
            return self.walk(found, share)
        finally:
            self._is_new_list = False


@pytest.mark.parametrize("lost", [0.009, 0.0], ids=["too much together", "nothing"])
def test_a_head_and_its_list_lose_one_per_cent_of_what_was_known_together(
    lost: float, tmp_path: Path
) -> None:
    """Each of both was let lose one per cent: every later head was refused for the list's loss."""
    base = [text.record() for text in texts([12] * 9, 100, "base")]
    _, told, head = offered(Forgetting(base, lost), tmp_path, base=Base((), base))
    found = dict(told)["offer"]["promise"]["base"]
    assert found["new"] / found["old"] == pytest.approx(0.991)
    vocab = vocab_beside(head)
    assert vocab is not None and (33 in vocab.ids) == (lost == 0)


def test_walks_with_another_list_count_as_time_of_checks(tmp_path: Path) -> None:
    """So that they, too, take a fifth of the time at most. The clock ticks once when it is read."""
    loop, _, _ = offered(Drafting(33, 0.2), tmp_path)
    assert loop._check_seconds == 2.0, "walks of the check, and walks with the list"


@pytest.mark.parametrize("renews", [True, False], ids=["the same tokens again", "not renewed"])
def test_a_list_that_stays_lies_beside_the_head_without_a_walk(
    renews: bool, tmp_path: Path
) -> None:
    """Without it a start with the same folder would begin with the list that was given at first."""
    vocab = DraftVocab.of(range(25, 35), vocab_size=64) if renews else SERVED
    training = Drafting(33, 0.2)
    loop, told, head = offered(training, tmp_path, vocab=vocab, renews=renews)
    assert vocab_beside(head) == vocab and training.walked == []
    assert "vocab" not in dict(told) and loop._check_seconds == 1.0


def test_a_list_that_is_not_renewed_stays_whatever_lies_beside_heads(tmp_path: Path) -> None:
    """The engine replaces no list beside which requests draft tokens of their own."""
    training = Drafting(33, 0.2)
    loop, _, head = offered(training, tmp_path, renews=False)
    write_vocab(renewed(SERVED, records([33])), head)
    loop.served(head)
    assert loop._vocab == SERVED and not any("draft" in call for call in training.calls)
