"""Conversations carried on with the model's own answers."""

from __future__ import annotations

import pytest

from headstart.data.conversations import Conversation, Message
from headstart.data.fingerprints import prompt_sha
from headstart.data.journal import Answer
from headstart.distill.dialogue import Dialogue, answer_seed, open_dialogues
from headstart.distill.options import DistillOptions
from headstart.errors import ConfigError, DataError


def says(role: str, content: str) -> Message:
    return {"role": role, "content": content}


TALK = Conversation(
    "talk", "general",
    (says("system", "s"), says("user", "one"), says("assistant", "given"), says("user", "two")),
)  # fmt: skip


def opened(*answers: Answer, samples: int = 1, after_cut: bool = False) -> list[Dialogue]:
    return open_dialogues([TALK], answers, samples=samples, goes_on_after_cut=after_cut)


def reply(dialogue: Dialogue, text: str, finish_reason: str = "stop") -> Answer:
    return dialogue.answer(
        text=text, prompt_ids=[1], answer_ids=[2], finish_reason=finish_reason, seed=3,
        exact_ids=True,
    )  # fmt: skip


def test_the_next_turn_is_asked_with_the_models_own_answer() -> None:
    (dialogue,) = opened()
    assert dialogue.messages() == [says("system", "s"), says("user", "one")]
    dialogue.take(reply(dialogue, "mine"))
    assert dialogue.messages() == [
        says("system", "s"), says("user", "one"), says("assistant", "mine"), says("user", "two"),
    ]  # fmt: skip
    assert (dialogue.turn, dialogue.turns_left, dialogue.user) == (1, 1, "two")
    dialogue.take(reply(dialogue, "again"))
    assert dialogue.turns_left == 0


def test_known_answers_are_not_asked_for_again() -> None:
    (first,) = opened()
    known = reply(first, "mine")
    again, other = opened(known, samples=2)
    assert (again.turn, again.messages()[2]["content"]) == (1, "mine")
    assert other.turn == 0


@pytest.mark.parametrize(("after_cut", "left"), [(False, 0), (True, 1)])
def test_a_conversation_ends_with_an_answer_that_was_cut_off(after_cut: bool, left: int) -> None:
    (dialogue,) = opened(after_cut=after_cut)
    dialogue.take(reply(dialogue, "mi", "length"))
    assert dialogue.turns_left == left


def test_a_prompt_that_changed_is_refused() -> None:
    (first,) = opened()
    known = reply(first, "mine")
    changed = Conversation("talk", "general", (says("user", "else"),))
    with pytest.raises(DataError, match="prompt 'talk' was answered before with another text"):
        open_dialogues([changed], [known], samples=1, goes_on_after_cut=False)
    assert prompt_sha(changed.messages) != known.prompt_sha


def test_every_answer_has_its_own_seed_that_fits_a_signed_number() -> None:
    seeds = {
        answer_seed(seed, f"p{prompt}", turn, sample)
        for seed in (0, 1) for prompt in range(20) for turn in range(3) for sample in range(4)
    }  # fmt: skip
    assert len(seeds) == 2 * 20 * 3 * 4
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert answer_seed(0, "p", 0, 0) == answer_seed(0, "p", 0, 0)


@pytest.mark.parametrize(
    ("fields", "found"),
    [({"samples": 0}, "samples is 0"), ({"heldout": 2}, "heldout is 2"), ({"seed": -1}, "seed is"),
     ({"server": "host:8000"}, "give a URL"), ({"timeout_seconds": 0}, "timeout_seconds is 0"),
     ({"limit": 0}, "limit is 0")],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_bad_options_are_refused(fields: dict[str, float], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        DistillOptions(**fields)
