"""`headstart distill --import`: given conversations, taken as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.distill_runs import chat_model, contents, run
from support.tiny_fixture import Tiny

from headstart.data.dataset import Dataset
from headstart.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def model(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tiny, tmp_path_factory.mktemp("chat") / "model")


def written(path: Path, *talks: list[tuple[str, str]]) -> Path:
    lines = [{"conversations": [{"from": who, "value": text} for who, text in t]} for t in talks]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def imported(model: Path, path: Path, out: Path, **options: Any) -> list[str]:
    told: list[str] = []
    run(model, path, out, as_given=True, heldout=0.0, warn=told.append, **options)
    return told


def test_each_answer_is_a_record_that_ends_where_the_model_would(
    model: Path, tmp_path: Path
) -> None:
    talk = [("human", "t11"), ("gpt", "t21 t22"), ("human", "t12"), ("gpt", "t23")]
    path = written(tmp_path / "talks.jsonl", talk)
    (warning,) = imported(model, path, tmp_path / "d")
    assert "2.54 instead of 2.73" in warning
    first, second = Dataset.open(tmp_path / "d").records("train")
    # What the template puts behind the end token (t5) belongs to the next prompt, not the answer.
    assert first.ids.tolist() == [2, 11, 3, 21, 22, 1]
    assert first.mask.tolist() == [False] * 3 + [True] * 3
    assert second.ids.tolist() == [2, 11, 3, 21, 22, 1, 5, 2, 12, 3, 23, 1]
    assert second.mask.tolist() == [False] * 10 + [True] * 2
    assert (second.turn, second.seed, second.exact_ids, second.sampling) == (1, None, False, {})


def test_importing_more_adds_to_what_is_there(model: Path, tmp_path: Path) -> None:
    talks = [[("human", f"t{11 + i}"), ("gpt", f"t{21 + i} t50")] for i in range(3)]
    path = written(tmp_path / "talks.jsonl", *talks)
    imported(model, path, tmp_path / "d", limit=1)
    imported(model, path, tmp_path / "d")
    assert [row[0] for row in contents(tmp_path / "d")["train"]] == [
        f"talks-{i}/t0/s0" for i in (1, 2, 3)
    ]


def test_conversations_without_an_answer_are_reported(model: Path, tmp_path: Path) -> None:
    path = written(
        tmp_path / "talks.jsonl", [("human", "t11")], [("human", "t12"), ("gpt", "t31 t32")]
    )
    imported(model, path, tmp_path / "d")
    report = Dataset.open(tmp_path / "d").header.report
    assert report["kept"] == 1
    assert list(report["refused"]["examples"]) == ["talks-1"]


def test_a_template_that_rewrites_answers_is_refused(
    model: Path, tiny: Tiny, tmp_path: Path
) -> None:
    own = chat_model(tiny, tmp_path / "model")
    (own / "chat_template.jinja").write_text(
        "{{ messages | length }} t4{% if add_generation_prompt %} t3{% endif %}"
    )
    path = written(tmp_path / "talks.jsonl", [("human", "t11"), ("gpt", "t21")])
    with pytest.raises(DataError, match="'talks-1': the chat template renders an answer otherwise"):
        imported(own, path, tmp_path / "d")


def test_messages_that_a_template_refuses_are_reported(tiny: Tiny, tmp_path: Path) -> None:
    own = chat_model(tiny, tmp_path / "model")
    template = (own / "chat_template.jinja").read_text()
    refusal = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    (own / "chat_template.jinja").write_text(refusal + template)
    good = [("human", "t11"), ("gpt", "t21")]
    path = written(tmp_path / "talks.jsonl", [("system", "t9"), *good], good)
    imported(own, path, tmp_path / "d")
    report = Dataset.open(tmp_path / "d").header.report
    assert (report["kept"], report["refused"]["count"]) == (1, 1)
    assert "no system" in report["refused"]["examples"]["talks-1"]


def test_importing_asks_nobody(model: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "talks.jsonl", [("human", "t11"), ("gpt", "t21")])
    with pytest.raises(ConfigError, match="takes the answers of the file"):
        imported(model, path, tmp_path / "d", server="http://127.0.0.1:9")
