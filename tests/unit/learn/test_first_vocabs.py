"""Which draft vocabulary a server and its learner begin with, after whatever was before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headstart.learn import vocabs
from headstart.learn.certainty import Walked
from headstart.learn.folder import START, Folder
from headstart.learn.known import KnownWalks
from headstart.learn.texts import Text
from headstart.learn.vocabs import FILE, first_vocab, running_vocab, vocab_beside, write_vocab
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import write

SERVED, LEARNED, OTHER = (
    DraftVocab.of(range(first, first + 10), vocab_size=64) for first in (10, 20, 5)
)


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
    write_vocab(LEARNED, second)
    assert first_vocab(folder, second, given) == second / FILE
    assert first_vocab(folder, start, given) == start / FILE, "the head was taken back"


def test_another_list_than_before_is_taken_and_lies_beside_every_head(
    folder: Folder, tmp_path: Path
) -> None:
    start, second = folder.heads / START, folder.heads / "0002"
    first_vocab(folder, start, made(tmp_path / "given.json", SERVED))
    write_vocab(LEARNED, second)
    given = made(tmp_path / "other.json", OTHER)
    assert first_vocab(folder, second, given) == given
    assert vocab_beside(start) == vocab_beside(second) == OTHER
    assert vocab_beside(folder.heads / "0001") is None, "it had none"


def test_several_lists_are_left_as_they_are(folder: Folder, tmp_path: Path) -> None:
    both = [DraftVocab.of([1, 2], name=name, vocab_size=64) for name in ("de", "en")]
    write(both, tmp_path / "both.json")
    found = first_vocab(folder, folder.heads / START, tmp_path / "both.json")
    assert found == tmp_path / "both.json" and vocab_beside(folder.heads / START) is None


@pytest.mark.parametrize("end", ["0001", "0002", START])
@pytest.mark.parametrize("again", [SERVED, OTHER], ids=["the list before", "the new list"])
def test_a_kill_between_two_files_leaves_no_list_that_was_not_given(
    end: str, again: DraftVocab, folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list beside START says which one lies beside the others, so it is written last."""
    start, second = folder.heads / START, folder.heads / "0002"
    for head, vocab in ((start, SERVED), (folder.heads / "0001", LEARNED), (second, LEARNED)):
        write_vocab(vocab, head)
    found, order = Path.glob, list[str]()

    def start_first(path: Path, pattern: str) -> Iterator[Path]:
        return iter(sorted(found(path, pattern), key=lambda each: each.parent != start))

    def write_and_end(vocab: DraftVocab, head: Path) -> None:
        order.append(head.name)
        write_vocab(vocab, head)
        if head.name == end:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "glob", start_first)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(vocabs, "write_vocab", write_and_end)
        first_vocab(folder, second, made(tmp_path / "new.json", OTHER))
    assert order == ["0001", "0002", START][: len(order)]
    given = made(tmp_path / "again.json", again)
    read = first_vocab(folder, second, given)
    is_done = end == START and again == OTHER
    assert read == (second / FILE if is_done else given)
    assert vocab_beside(second) == again


def test_a_head_that_was_learned_without_a_list_gets_it_and_others_keep_theirs(
    folder: Folder, tmp_path: Path
) -> None:
    given, first = made(tmp_path / "given.json", SERVED), folder.heads / "0001"
    first_vocab(folder, folder.heads / START, given)
    write_vocab(LEARNED, first)
    assert first_vocab(folder, folder.heads / "0002", given) == given
    assert [vocab_beside(folder.heads / name) for name in ("0001", "0002", START)] == [
        LEARNED, SERVED, SERVED,
    ]  # fmt: skip


def test_a_learner_that_is_started_again_drafts_from_the_list_beside_its_head(
    folder: Folder, tmp_path: Path
) -> None:
    """It was given the list of the server's start, which swaps had replaced in the engine."""
    given, second = made(tmp_path / "given.json", SERVED), folder.heads / "0002"
    assert running_vocab(given, second, renews=True) == SERVED, "there is none beside it"
    write_vocab(LEARNED, second)
    assert running_vocab(given, second, renews=True) == LEARNED
    assert running_vocab(given, second, renews=False) == SERVED, "swaps replace no list"
    assert running_vocab(given, None, renews=True) == SERVED
    assert running_vocab(None, second, renews=True) is None
    gone = folder.heads / "0001" / FILE  # of a head that was removed since the start
    for renews in (True, False):
        assert running_vocab(gone, second, renews=renews) == LEARNED


def test_of_several_lists_none_is_known_whatever_lies_beside_the_head(
    folder: Folder, tmp_path: Path
) -> None:
    both = [DraftVocab.of([1, 2], name=name, vocab_size=64) for name in ("de", "en")]
    write(both, tmp_path / "both.json")
    write_vocab(LEARNED, folder.heads / START)
    assert running_vocab(tmp_path / "both.json", folder.heads / START, renews=True) is None


WHOLE, SHORT = None, SERVED.ids


@pytest.mark.parametrize(
    "order",
    [[WHOLE, SHORT, WHOLE], [SHORT, WHOLE, SHORT], [SHORT, OTHER.ids, SHORT]],
    ids=["later with a list", "later without, or `learn run`", "another list"],
)
def test_what_was_known_is_held_against_walks_with_the_same_list(
    order: list[tuple[int, ...] | None], tmp_path: Path
) -> None:
    """A list costs acceptance: held against walks of the whole vocabulary every head was refused,
    and held against those of a list any loss was allowed."""
    text = Text(id="a", prompt=[3], answer=[4], kind="", time=0.0, finish_reason="stop")
    records = [text.record()]

    def known(ids: tuple[int, ...] | None, serving: int) -> int:
        walks = KnownWalks(tmp_path / "known.json", ids)
        return walks.of(records, {"a": Walked("", 100, serving)})["a"].tokens

    assert [known(order[0], 200), known(order[1], 194)] == [200, 194]
    assert [known(order[2], 199), known(order[1], 193)] == [200, 194], "over restarts, too"
