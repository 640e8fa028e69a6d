"""The language of a text by its characters: scripts, mixtures, code."""

from __future__ import annotations

import pytest

from headstart.vocab.languages import code_line_share, is_code, language_of, script_units

PYTHON = "def add(a, b):\n    total = a + b\n    return total\n\nprint(add(1, 2))\n"
C = '#include <stdio.h>\nint main(void) {\n    puts("hi");\n    return 0;\n}\n'
TEXTS = {
    "english": ("The weather is nice today, is it not?", "en"),
    "french counts as latin": ("Où est la bibliothèque, s'il vous plaît ?", "en"),
    "chinese": ("今天天气很好。我们去公园散步吧。", "zh"),
    "chinese with english words": ("使用 Python 的 asyncio 可以同时处理很多连接。", "zh"),
    "english with chinese words": ("The word 你好 means hello and 谢谢 means thank you.", "en"),
    "japanese": ("今日は天気がいいので、公園を散歩しましょう。", "ja"),
    "korean": ("오늘은 날씨가 좋네요.", "ko"),
    "russian": ("Сегодня хорошая погода.", "ru"),
    "python": (PYTHON, "code"),
    "c": (C, "code"),
    "json": ('{\n  "name": "x",\n  "size": 3\n}\n', "code"),
    "chinese comments in code": (
        "# 计算总和\ndef total(xs):\n    s = 0\n    for x in xs:\n        s += x\n    return s\n",
        "code",
    ),
    "mostly fenced": (f"Here it is:\n```python\n{PYTHON}```\n", "code"),
    "a fence that was never closed": (f"Sure.\n```python\n{PYTHON}", "code"),
    "prose with a little code": (
        "Addition is a binary operation on numbers. It is commutative, associative and has a "
        "neutral element, and every child learns it. In Python:\n```python\na + b\n```\nThat "
        "is all there is to say about it, more or less.",
        "en",
    ),
    "prose in lines": ("First we wait.\nThen we go home;\nit is late: we sleep.\nSo long!", "en"),
    "a list": ("Three things:\n- apples\n- pears\n- plums, which are blue", "en"),
    "steps of arithmetic": (
        "Natalia sold 48 clips in April.\nIn May she sold half of that, which is 24.\n"
        "Together that makes 72 clips.\n#### 72",
        "en",
    ),
    "numbers only": ("1 + 1 = 2", "other"),
    "nothing": ("", "other"),
}  # fmt: skip


@pytest.mark.parametrize("case", TEXTS)
def test_the_language_of_a_text(case: str) -> None:
    text, language = TEXTS[case]
    assert language_of(text) == language


def test_words_are_counted_so_that_one_long_word_does_not_outvote_many_characters() -> None:
    assert script_units("中文 internationalisation 中") == {"zh": 3, "en": 1}
    assert language_of("中文 internationalisation 中") == "zh"


def test_one_line_is_too_little_to_call_it_code() -> None:
    assert code_line_share("x = 1") == 0
    assert not is_code("x = 1")
    assert is_code("x = 1\ny = 2")
