"""Near-duplicates are found among many texts, and only they."""

from __future__ import annotations

import random

import numpy as np
import pytest

from headstart.distill.minhash import Text, jaccard, near_duplicates, shingles, signature


def words(count: int, draw: random.Random) -> list[str]:
    return ["".join(draw.choices("abcdefghijklmnop", k=6)) for _ in range(count)]


def test_a_signature_estimates_the_similarity() -> None:
    draw = random.Random(0)
    shared, one, two = (" ".join(words(n, draw)) for n in (120, 40, 40))
    first, second = shingles(f"{shared} {one}"), shingles(f"{shared} {two}")
    exact = jaccard(first, second)
    estimated = float((signature(first) == signature(second)).mean())
    assert 0.5 < exact < 0.7
    assert estimated == pytest.approx(exact, abs=0.2)


def test_shingles_do_not_mind_case_and_white_space() -> None:
    assert np.array_equal(shingles("The  quick\nbrown fox"), shingles("the quick BROWN fox "))
    assert len(shingles("")) == 0
    assert len(shingles("short")) == 1
    assert jaccard(shingles("short"), shingles("other")) == 0


def test_a_changed_word_makes_a_duplicate_and_a_changed_half_does_not() -> None:
    draw = random.Random(1)
    texts = [words(80, draw) for _ in range(200)]
    nearly = [*texts[17]]
    nearly[40] = "another"
    half = [*texts[30][:40], *words(40, draw)]
    answers = [" ".join(text) for text in (*texts, nearly, half)]
    found = near_duplicates([Text(f"question {i}", a, str(i)) for i, a in enumerate(answers)], 0.8)
    assert found == {200: 17}


def test_an_answer_in_another_script_is_compared_too() -> None:
    draw = random.Random(2)
    text = "".join(chr(draw.randrange(0x4E00, 0x9FA5)) for _ in range(60))
    changed = text[:30] + "\u4e00" + text[31:]
    other = "".join(chr(draw.randrange(0x4E00, 0x9FA5)) for _ in range(60))
    texts = [Text("q", a, str(i)) for i, a in enumerate((text, changed, other))]
    assert near_duplicates(texts, 0.7) == {1: 0}


def test_samples_of_one_long_prompt_are_compared_by_their_answers() -> None:
    draw = random.Random(3)
    question = " ".join(words(300, draw))
    answers = [" ".join(words(10, draw)) for _ in range(2)]
    together = [Text(question, answer, "same") for answer in [*answers, answers[0]]]
    assert near_duplicates(together, 0.8) == {2: 0}
    # Control: for two questions that only look alike, the long common part does count.
    apart = [Text(question, answer, str(i)) for i, answer in enumerate(answers)]
    assert near_duplicates(apart, 0.8) == {1: 0}


def test_texts_without_words_are_nobodys_duplicate() -> None:
    assert near_duplicates([Text("", "", "a"), Text("", " ", "b")], 0.8) == {}
