"""What is asked: from files and made up, the same for the same seed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headstart.bench.arrivals import LoadOptions, arrival_seconds
from headstart.bench.workload import (
    Vocabulary,
    Workload,
    WorkloadOptions,
    make_workload,
    parse_lengths,
)
from headstart.data.conversations import Conversation
from headstart.errors import ConfigError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def lines(*entries: dict[str, Any]) -> Path:
        file = tmp_path / "prompts.jsonl"
        file.write_text("\n".join(map(json.dumps, entries)))
        return file

    return lines


def made(count_tokens: Callable[[str], int] | None = None, **options: Any) -> Workload:
    return make_workload(WorkloadOptions(**options), Vocabulary(count_tokens=count_tokens))


def words(text: str) -> int:
    return len(text.split())


def test_questions_of_several_turns_are_cut_to_the_number_of_requests(write: Write) -> None:
    file = write(
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        {"question_id": 82, "category": "math", "turns": ["c", "d"]},
    )
    workload = made(prompts=file, num_requests=3)
    assert [(q.id, q.category, q.num_turns) for q in workload.questions] == [
        ("81", "writing", 2), ("82", "math", 1),
    ]  # fmt: skip
    assert made(prompts=file).num_requests == 4 and not workload.ignore_eos


def test_a_short_file_is_gone_through_again_and_that_is_noted(write: Write) -> None:
    workload = made(prompts=write({"prompt": "a", "id": "x"}), num_requests=3)
    assert [question.id for question in workload.questions] == ["x", "x#2", "x#3"]
    assert any("prefix cache" in note for note in workload.notes)


def test_answers_can_be_as_long_as_those_of_the_file(write: Write) -> None:
    said = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "one two three"}]
    file = write({"conversations": [*said, {"from": "human", "value": "no answer"}]})
    workload = made(words, prompts=file, output_tokens="file")
    assert [question.max_tokens for question in workload.questions] == [(3,)]
    assert workload.ignore_eos and not workload.notes
    guessed = made(prompts=file, output_tokens="file")
    assert guessed.questions[0].max_tokens == (4,) and "4 characters" in guessed.notes[0]


def test_made_up_prompts_have_the_length_asked_for() -> None:
    workload = made(words, input_tokens="20-30", output_tokens="5-9", num_requests=40)
    prompts = [question.prompt for question in workload.questions]
    sizes = [words(p.messages[0]["content"]) for p in prompts if isinstance(p, Conversation)]
    assert len(sizes) == 40 and set(sizes) == set(range(20, 31))
    assert {question.max_tokens[0] for question in workload.questions} == {5, 6, 7, 8, 9}


def test_made_up_token_ids_are_exact_and_within_the_vocabulary() -> None:
    options = WorkloadOptions(input_tokens="50", api="completions", num_requests=20)
    workload = make_workload(options, Vocabulary(size=97))
    for question in (*workload.questions, *workload.warm_up):
        assert isinstance(question.prompt, tuple) and len(question.prompt) == 50
        assert all(0 <= i < 97 for i in question.prompt)


def test_the_seed_decides_everything_and_warm_up_is_asked_nowhere_else() -> None:
    one, same = made(seed=1, num_requests=5), made(seed=1, num_requests=5)
    assert one == same
    assert one.questions[0].prompt != made(seed=2, num_requests=5).questions[0].prompt
    asked = {str(question.prompt) for question in one.questions}
    assert not asked & {str(question.prompt) for question in one.warm_up}


def test_completions_continue_one_text(write: Write) -> None:
    workload = made(prompts=write({"prompt": "a"}), api="completions")
    assert workload.questions[0].prompt == "a"
    with pytest.raises(ConfigError, match="Ask the chat API"):
        made(prompts=write({"turns": ["a", "b"]}), api="completions")


@pytest.mark.parametrize("text", ["", "0", "-5", "5-", "9-5", "x"])
def test_lengths_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="100-500"):
        parse_lengths(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_requests": 0}, "at least 1"),
        ({"prompts": Path("x"), "input_tokens": "5"}, "a file or a length"),
        ({"output_tokens": "file"}, "without a file"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        WorkloadOptions(**options)


def test_arrivals_have_the_rate_asked_for() -> None:
    poisson = arrival_seconds(LoadOptions(rate=50.0), 4000, seed=3)
    gaps = [later - earlier for earlier, later in pairwise(poisson)]
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.1)  # as for a Poisson process
    assert poisson == arrival_seconds(LoadOptions(rate=50.0), 4000, seed=3)
    even = arrival_seconds(LoadOptions(rate=4.0, spacing="constant"), 3, seed=3)
    assert even == [0.0, 0.25, 0.5]


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"rate": 0.0}, {"warm_up": -1}])
def test_loads_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LoadOptions(**options)


def test_a_file_can_be_taken_in_another_order_and_nothing_else_can(write: Write) -> None:
    file = write(*({"prompt": str(i), "id": str(i)} for i in range(8)))
    plain, turned = (
        [question.id for question in made(prompts=file, shuffle=shuffle).questions]
        for shuffle in (False, True)
    )
    assert sorted(turned) == plain != turned
    with pytest.raises(ConfigError, match="shuffle is set without a file"):
        WorkloadOptions(shuffle=True)
