"""Answers on a terminal, without a model: a scripted engine says what a real one would."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from headstart.cli.generate import Tint, answer, converse, loading, run
from headstart.engine.options import EngineOptions
from headstart.engine.output import Completion, Result, Update
from headstart.engine.stats import RequestStats
from headstart.errors import ConfigError, RequestError
from headstart.sampling.params import SamplingParams

PIECES = ["Hel", "lo", " wor", "ld", "!", ""]


class Pieces:
    """Token i is the i-th piece of text; 9 is half a character, 10 the other half."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        text, half = "", False
        for token in tokens:
            if token == 9:
                half = True
            elif token == 10 and half:
                text, half = text + "\u00e9", False
            else:
                text += PIECES[token]
        return text + ("\ufffd" if half else "")


def tinted(*rounds: tuple[str, list[int], list[str]]) -> list[tuple[str, str]]:
    tint = Tint(Pieces(), SamplingParams())
    return [piece for text, ids, origins in rounds for piece in tint.pieces(text, ids, origins)]


def test_every_token_has_the_colour_of_its_own_origin() -> None:
    """Regression: a round was all green if one token of it was accepted."""
    assert tinted(("Hello wor", [0, 1, 2], ["accepted", "accepted", "recovered"])) == [
        ("Hel", "green"), ("lo", "green"), (" wor", "red"),
    ]  # fmt: skip
    assert tinted(("Hello", [0, 1], ["accepted", "bonus"])) == [("Hel", "green"), ("lo", "default")]


def test_text_that_comes_later_keeps_the_colour_of_its_token() -> None:
    parts = tinted(
        ("He", [0], ["accepted"]),  # "l" may begin a stop string
        ("l", [1], ["recovered"]),
        ("lo", [9], ["accepted"]),  # half a character has no text yet
        ("\u00e9", [10], ["recovered"]),
    )
    assert parts == [("He", "green"), ("l", "green"), ("lo", "red"), ("\u00e9", "red")]


def test_text_without_tokens_is_shown_and_tokens_without_text_do_no_harm() -> None:
    """Regression: text without tokens was a StopIteration."""
    assert tinted(("x", [], [])) == [("x", "default")]
    assert tinted(("", [5], ["accepted"]), ("Hel", [0], ["recovered"])) == [("Hel", "red")]


@dataclass
class ScriptedEngine:
    """Gives prepared rounds: (tokens, origins) each; remembers what it was asked."""

    answers: list[list[tuple[list[int], list[str]]]]
    prompts: Any = field(default_factory=lambda: type("P", (), {"tokenizer": Pieces()})())
    asked: list[Any] = field(default_factory=list)
    rounds: list[Any] = field(default_factory=list)
    said: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    aborted: list[str] = field(default_factory=list)
    finish_reason: str = "stop"
    interrupts_at: int | None = None  # rounds that are left then
    admission: Any = field(default_factory=lambda: type("A", (), {"longest": 40})())

    def add(self, prompt: Any, params: SamplingParams) -> str:
        self.asked.append([dict(message) for message in prompt])
        if prompt[-1]["content"] == "too long":
            raise RequestError("the prompt has too many tokens.")
        self.rounds, self.said, self.origins = self.answers.pop(0), [], []
        self.stats = RequestStats()
        return "r"

    @property
    def has_work(self) -> bool:
        return bool(self.rounds)

    def step(self) -> list[Update]:
        if len(self.rounds) == self.interrupts_at:
            raise KeyboardInterrupt
        ids, origins = self.rounds.pop(0)
        self.said += ids
        self.origins += origins
        if len(self.said) > len(ids):
            self.stats.rounds[3, len(ids) - 1] += 1
        text = Pieces().decode(ids, skip_special_tokens=True)
        return [Update("r", 0, ids, text, origins, [], None)]

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def collect(self, request_id: str) -> Result:
        text = Pieces().decode(self.said, skip_special_tokens=True)
        done = Completion(
            0, self.said, text, self.finish_reason, None, self.origins, None, self.stats
        )
        return Result("r", [], [done])


HELLO = [([0], ["bonus"]), ([1, 2, 3], ["accepted", "accepted", "recovered"])]
SHORT = [([0], ["bonus"]), ([1], ["recovered"])]


def test_a_chat_remembers_what_was_said_and_counts_each_answer_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the acceptance length shown was that of the whole session."""
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n\ntoo long\nmore\n"))
    engine = ScriptedEngine([HELLO[:], SHORT[:]])
    converse(engine, SamplingParams())
    shown = capsys.readouterr()
    assert "Hello world" in shown.out
    assert "4 tokens in 1 rounds, acceptance length 3.00" in shown.err
    assert "2 tokens in 1 rounds, acceptance length 1.00" in shown.err
    assert "error: the prompt has too many tokens." in shown.err
    roles = [[message["content"] for message in messages] for messages in engine.asked]
    assert roles == [["hi"], ["hi", "Hello world", "too long"], ["hi", "Hello world", "more"]]


def test_an_interrupt_ends_the_answer_and_not_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n\nmore\n"))
    engine = ScriptedEngine([HELLO[:], SHORT[:1]])
    engine.interrupts_at = 2
    converse(engine, SamplingParams())
    assert "stopped; end with Ctrl-D" in capsys.readouterr().err
    assert [[m["content"] for m in messages] for messages in engine.asked] == [["hi"], ["more"]]


def test_an_answer_that_is_cut_off_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [{"role": "user", "content": "hi"}]
    for tokens, is_cut in ((4, True), (None, False)):
        engine = ScriptedEngine([HELLO[:]], finish_reason="length" if is_cut else "stop")
        answer(engine, asked, SamplingParams(max_tokens=tokens), quiet=False)
        shown = capsys.readouterr().err
        assert ("; cut off at 4 tokens (--max-tokens)" in shown) is is_cut


def test_an_interrupted_answer_leaves_nothing_behind() -> None:
    engine = ScriptedEngine([HELLO[:]])

    def interrupt() -> list[Update]:
        raise KeyboardInterrupt

    engine.step = interrupt
    with pytest.raises(KeyboardInterrupt):
        answer(engine, [{"role": "user", "content": "hi"}], SamplingParams(), quiet=True)
    assert engine.aborted == ["r"]


def test_what_is_said_of_an_answer_has_lines_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a note, and the word of an interrupt, were glued to the answer."""
    both = io.StringIO()
    monkeypatch.setattr("sys.stdout", both)
    monkeypatch.setattr("sys.stderr", both)
    asked = [{"role": "user", "content": "hi"}]
    engine = ScriptedEngine([HELLO[:], HELLO[:]], finish_reason="length")
    answer(engine, asked, SamplingParams(max_tokens=9), quiet=False)
    assert "Hello world\nnote: ended after 4 of 9 tokens" in both.getvalue()

    engine.interrupts_at = 1
    with pytest.raises(KeyboardInterrupt):
        answer(engine, asked, SamplingParams(), quiet=False)
    assert both.getvalue().endswith("Hel\n")


def test_a_quiet_answer_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine([HELLO[:]])
    said = answer(engine, [{"role": "user", "content": "hi"}], SamplingParams(), quiet=True)
    assert said["text"] == "Hello world" and said["acceptance"]["rounds"] == 1
    assert said["origins"] == ["bonus", "accepted", "accepted", "recovered"]
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")


@pytest.mark.parametrize("raw", [True, False])
def test_control_characters_of_an_answer_are_escapes_unless_raw_was_asked_for(
    raw: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("test_chat.PIECES", ["a\x1b[2J", "\r\n\tb", "\x9b1m\x07"])
    engine = ScriptedEngine([[([0], ["bonus"]), ([1, 2], ["accepted", "recovered"])]])
    answer(engine, [{"role": "user", "content": "hi"}], SamplingParams(), quiet=False, raw=raw)
    out = capsys.readouterr().out
    if raw:
        assert out == "a\x1b[2J\r\n\tb\x9b1m\x07"
    else:
        assert out == "a\\x1b[2J\\x0d\n\tb\\x9b1m\\x07\n"


def test_raw_is_not_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", Terminal())
    with pytest.raises(ConfigError, match="the output is a terminal"):
        run(model="none", prompt="hi", options=EngineOptions(), raw=True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [Terminal, io.StringIO], ids=["terminal", "pipe"])
def test_loading_is_told_on_a_terminal_only(
    kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = kind()
    monkeypatch.setattr("sys.stderr", stream)
    with loading("some/model"):
        pass
    assert ("loading some/model" in stream.getvalue()) == (kind is Terminal)
