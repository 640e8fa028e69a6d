"""The journal keeps what it was given, whatever happens in between."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from headstart.data.journal import Answer, Asked, Journal, earlier_answers, read_journal
from headstart.errors import DataError

ASKED = Asked(
    origin="engine", trunk_digest="d", tokenizer_sha="t", template_sha="c", vocab_size=64,
    hidden_size=8, sampling={"temperature": 0.6}, seed=1, chat_template_kwargs={},
)  # fmt: skip


def answer(name: str = "p", turn: int = 0) -> Answer:
    return Answer(
        prompt_id=name, category="general", turn=turn, sample=0, prompt_sha="00",
        user="q\u2028",
        text="a \ud800 b", prompt_ids=[1, 2], answer_ids=[3, 4], finish_reason="stop", seed=5,
        exact_ids=True,
    )  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Journal(tmp_path / "journal.jsonl", ASKED) as journal:
        for name in "abc":
            journal.append(answer(name))
    return tmp_path / "journal.jsonl"


def test_what_was_appended_is_read_back(path: Path) -> None:
    asked, answers = read_journal(path)
    assert asked == ASKED
    assert [a.id for a in answers] == ["a/t0/s0", "b/t0/s0", "c/t0/s0"]
    assert list(answers[0].prompt_ids) == [1, 2]
    assert (answers[0].text, answers[0].user) == ("a \ud800 b", "q\u2028")


def test_a_torn_last_line_is_ignored_and_the_next_answer_takes_its_place(path: Path) -> None:
    whole = path.read_bytes()
    for cut in (1, 30, len(whole.splitlines(keepends=True)[-1]) - 1):
        path.write_bytes(whole[:-cut])
        assert [a.prompt_id for a in read_journal(path)[1]] == ["a", "b"]
        with Journal(path, ASKED) as journal:
            journal.append(answer("c"))
        assert path.read_bytes() == whole


def test_a_torn_header_is_written_again(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:20])
    with pytest.raises(DataError, match="is empty: no answer was kept"):
        read_journal(path)
    Journal(path, ASKED).close()
    assert path.read_bytes() == whole.splitlines(keepends=True)[0]


def test_a_broken_line_in_the_middle_is_named(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"{oops\n" + lines[2])
    with pytest.raises(DataError, match="line 2 is not JSON"):
        read_journal(path)
    path.write_bytes(lines[0] + b'{"prompt_id": "x"}\n')
    with pytest.raises(DataError, match="line 2 lacks a field"):
        read_journal(path)


@pytest.mark.parametrize(
    "change",
    [{"trunk_digest": "e"}, {"sampling": {"temperature": 1}}, {"template_sha": "x"},
     {"origin": "import"}, {"seed": 2}, {"chat_template_kwargs": {"a": 1}}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_answers_asked_for_otherwise_are_refused(change: dict[str, object], path: Path) -> None:
    before = path.read_bytes()
    other = replace(ASKED, **change)
    name = next(iter(change))
    with pytest.raises(DataError, match=f"was begun with {name}"):
        Journal(path, other)
    with pytest.raises(DataError, match=f"was begun with {name}"):
        earlier_answers(path, other)
    assert path.read_bytes() == before
    Journal(path, ASKED).close()  # the lock is free again


def test_an_engine_that_computes_otherwise_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    facts = {"dtype": "float32", "weights": "as-dtype", "device": "cpu"}
    begun = replace(ASKED, engine=facts)
    Journal(path, begun).close()
    assert read_journal(path)[0].engine == facts
    for name in facts:
        other = replace(ASKED, engine={**facts, name: "other"})
        with pytest.raises(DataError, match=f"was begun with {name} .*'other'"):
            Journal(path, other)
    # Nothing is left to ask: no engine was started, none can be compared.
    assert earlier_answers(path, ASKED) == []
    Journal(path, ASKED).close()


def test_two_runs_cannot_write_at_once(path: Path) -> None:
    with Journal(path, ASKED), pytest.raises(DataError, match="another run is writing"):
        Journal(path, ASKED)


def test_a_full_disk_leaves_no_half_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()
    real = os.write

    def failing(handle: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data[:-10])

    with Journal(path, ASKED) as journal:
        monkeypatch.setattr(os, "write", failing)
        with pytest.raises(OSError, match="No space"):
            journal.append(answer("d"))
        monkeypatch.setattr(os, "write", real)
        assert path.read_bytes() == before
        journal.append(answer("e"))
    assert [a.prompt_id for a in read_journal(path)[1]] == ["a", "b", "c", "e"]


def test_what_a_link_leads_to_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("a key")
    (tmp_path / "journal.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(DataError, match=r"journal\.jsonl is a link"):
        Journal(tmp_path / "journal.jsonl", ASKED)
    assert (tmp_path / "precious").read_text() == "a key"
