"""Thinking is split from the answer in the same way however the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.errors import ConfigError
from headstart.server.grammars.specs import json_object
from headstart.server.reasoning import (
    REASONING_FORMATS,
    ReasoningSplitter,
    Start,
    after_reasoning,
    reasoning_format,
)

THINK = REASONING_FORMATS["think"]


def split(pieces: list[str], start: Start, name: str | None = "think") -> tuple[str, str]:
    splitter = ReasoningSplitter(REASONING_FORMATS[name] if name else None, start)
    parts = [*map(splitter.feed, pieces), splitter.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


CASES = [
    ("open", "\nhm, 1 < 2\n</think>\n\nYes.\n", "hm, 1 < 2", "Yes.\n"),
    ("open", "never ends </thi", "never ends </thi", ""),
    ("open", "</think>Yes", "", "Yes"),
    ("open", "a</think>b</think>c", "a", "b</think>c"),
    ("free", "\n<think>\nhm\n</think>\n\nYes", "hm", "Yes"),
    ("free", " Yes, <think>x</think>", "", " Yes, <think>x</think>"),
    ("free", "<thin", "", "<thin"),
    ("closed", "\n<think>x</think>", "", "<think>x</think>"),
    ("free", "", "", ""),
]


@pytest.mark.parametrize(("start", "text", "reasoning", "content"), CASES)
def test_text_is_split_at_the_markers(
    start: Start, text: str, reasoning: str, content: str
) -> None:
    assert split([text], start) == (reasoning, content)
    assert split(list(text), start) == (reasoning, content)
    assert split([text], start, None) == ("", text), "without a format all of it is content"


PARTS = st.sampled_from(["<think>", "</think>", "<", "</th", "ink>", " ", "\n", "a", "bc"])


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(PARTS, max_size=10), cuts=st.lists(st.integers(0, 60)),
    start=st.sampled_from(["open", "closed", "free"]),
)  # fmt: skip
def test_the_split_does_not_depend_on_how_the_text_was_cut(
    parts: list[str], cuts: list[int], start: Start
) -> None:
    text = "".join(parts)
    at = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(at)]
    assert split(pieces, start) == split([text], start)


def test_the_prompts_end_says_whether_the_block_is_open() -> None:
    assert THINK.start_in("<|assistant|>\n<think>\n") == "open"
    assert THINK.start_in("<|assistant|>\n<think>\n\n</think>\n\n") == "closed"
    assert THINK.start_in("what does <think> mean?<|assistant|>\n") == "free"


def test_reasoning_is_given_out_while_it_goes_on() -> None:
    splitter = ReasoningSplitter(THINK, "free")
    given = [splitter.feed(piece) for piece in ("<think>", "hm", "</think>", "Yes")]
    assert given == [("", ""), ("hm", ""), ("", ""), ("", "Yes")]


def test_the_format_comes_from_the_template_the_model_or_the_user() -> None:
    template = "{{ m.content.split('</think>')[-1] }}"
    assert reasoning_format(None, template) is THINK
    assert reasoning_format("auto", "no marks", "mimo", ["<think>", "</think>"]) is THINK
    assert reasoning_format("auto", "no marks", "mimo") is None, "a grafted model does not think"
    assert reasoning_format("auto", "no marks", "llama") is None
    assert reasoning_format("none", template) is None
    assert reasoning_format("kimi", template) is REASONING_FORMATS["kimi"]
    with pytest.raises(ConfigError, match="'thinking'; expected auto, none, think"):
        reasoning_format("thinking", template)


def test_a_grammar_is_left_alone_where_nothing_is_thought() -> None:
    spec = json_object()
    assert after_reasoning(spec, None, "open") is spec
    assert after_reasoning(spec, THINK, "closed") is spec
    assert after_reasoning(spec, THINK, "open") != after_reasoning(spec, THINK, "free")
