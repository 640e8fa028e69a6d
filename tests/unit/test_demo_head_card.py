"""The wider recipe of the demo's head: scores of a head that changes, and what its card says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.demo_recipe import recipe_modules

from headstart.data.dataset import Header, write_dataset
from headstart.data.records import Record


@pytest.fixture(scope="module")
def recipe() -> Iterator[SimpleNamespace]:
    names = ("collect", "passages", "scores", "wide_publish", "wide_settings", "wide_text")
    with recipe_modules(*names) as modules:
        yield modules


def line_of(head: str, set_name: str, length: float, ways: tuple[str, ...]) -> dict[str, Any]:
    walked = {
        "acceptance_length": [1.0, 1.0, 1.0, length, length, length],
        "acceptance_length_interval": None, "cumulative_acceptance": [0.5, 0.4, 0.3],
    }  # fmt: skip
    part = {"overall": {"walked": walked}, "by_category": {}}
    return {"head": head, "set": set_name, "all": dict.fromkeys(ways, part)}


@pytest.fixture
def scored(
    recipe: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> SimpleNamespace:
    """Settings to score with; a head's weights are its length on every set, and `asked` names what
    was scored."""
    asked: list[tuple[str, list[str]]] = []

    def score_head(settings: Any, wanted: tuple[str, tuple[Path, Path], list[str]]) -> list[Any]:
        name, (folder, _), sets = wanted
        asked.append((name, sets))
        length = float((folder / "head.safetensors").read_text())
        ways = (recipe.scores.SMALL, recipe.scores.WHOLE)
        return [line_of(name, set_name, length, ways) for set_name in sets]

    monkeypatch.setattr(recipe.scores, "_score_head", score_head)
    for name, length in (("first", 1.5), ("second", 1.6)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "head.safetensors").write_text(str(length))
    (tmp_path / "vocab.json").write_text("[1]")
    return SimpleNamespace(
        work=tmp_path, model="m", device="cpu", processes=1, stock=tmp_path / "first",
        evaluation={"a": tmp_path / "a", "b": tmp_path / "b"}, asked=asked,
    )  # fmt: skip


def test_another_head_of_the_same_name_is_scored_again(
    recipe: SimpleNamespace, scored: SimpleNamespace
) -> None:
    """Regression: a finished training got the scores of the one that its deadline had stopped."""
    vocab = scored.work / "vocab.json"
    heads = {name: (scored.work / name, vocab) for name in ("first", "second", "missing")}

    def lengths() -> dict[tuple[str, str], float]:
        found = recipe.scores.score_all(scored, heads)
        assert len(found) == len(recipe.scores.lines(scored.work / "scores.jsonl")) == 4
        way = recipe.scores.WHOLE
        return {(n["head"], n["set"]): recipe.scores.length_of(n, way) for n in found}

    first = lengths()
    assert first["first", "a"] == first["first", "b"] == 1.5 and first["second", "a"] == 1.6
    assert lengths() == first and len(scored.asked) == 2, "nothing is scored twice"
    (scored.work / "first" / "head.safetensors").write_text("1.9")
    digests = recipe.scores.digests_of(heads)
    kept = recipe.scores.current(scored.work / "scores.jsonl", digests)
    assert {line["head"] for line in kept} == {"second"}, "no card may have the old ones"
    assert lengths() == {**first, ("first", "a"): 1.9, ("first", "b"): 1.9}
    assert scored.asked[2:] == [("first", ["a", "b"])]
    vocab.write_text("[2]")
    lengths()
    assert len(scored.asked) == 5, "another draft vocabulary gives other scores"


def record(prompt: str, sample: int) -> Record:
    return Record(
        id=f"{prompt}/t0/s{sample}", prompt_id=prompt, category="c", turn=0, sample=sample,
        ids=np.arange(9, dtype=np.int32), mask=np.arange(9) >= 4, seed=None,
        sampling={"temperature": 0.0}, finish_reason="stop", exact_ids=True, num_prompt=4,
        max_tokens=64,
    )  # fmt: skip


@pytest.fixture
def wide(recipe: SimpleNamespace, tmp_path: Path) -> Any:
    """A work folder after training: of most prompts nothing was used."""
    passages = [
        recipe.passages.Passage(f"passage {i}", "en", False, package)
        for i, package in enumerate(("debian-policy", "flask", "home-made", "requests"))
    ]
    recipe.collect.write_passages(tmp_path / "passages.jsonl.xz", passages)
    prompts = [
        {"prompt": f"words {i}", "source": "set-one", "licence": "MIT", "id": f"people-{i}"}
        for i in range(5)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    names = [f"{p.sha[:16]}-0" for p in passages[1:3]]
    names += ["people-3", "own-0123456789abcdef", f"{names[0]}-then-1", "people-4-then-0"]
    header = Header(
        origin="engine", trunk_digest="t", tokenizer_sha="s", template_sha="x", vocab_size=1000,
        hidden_size=8, sampling={"temperature": 0.0}, seed=0, chat_template_kwargs={}, counts={},
        report={"temperatures": [0.0, 0.7, 1.0, 0.3]},
    )  # fmt: skip
    work = tmp_path / "work"
    (work / "answers").mkdir(parents=True)
    records = [record(name, sample) for name in names for sample in (0, 1)]
    write_dataset(work / "answers", header, {"train": records, "heldout": [record("people-0", 0)]})
    return recipe.wide_settings.Wide(
        work=work, passages=tmp_path / "passages.jsonl.xz", prompts=tmp_path / "prompts.jsonl",
        questions=tmp_path / "mt.jsonl", avoided=(tmp_path / "spec.jsonl",),
    )  # fmt: skip


def test_a_card_counts_what_was_used(recipe: SimpleNamespace, wide: Any) -> None:
    """Regression: all prompts of the file and all packages of the list were named."""
    card = " ".join(recipe.wide_publish.card(wide).split())  # lines are wrapped
    assert "| set-one | MIT | 2 |" in card and "| the model itself | Apache-2.0 | 1 |" in card
    assert "| tasks made of passages of packages | see below | 2 |" in card
    assert "flask (BSD-3-Clause); home-made (not stated)." in card
    assert "debian-policy" not in card and "requests" not in card
    assert "temperatures 0, 0.7)" in card, "there was no time for the others"


@pytest.mark.parametrize(
    ("noted", "said"),
    [
        (["mt.jsonl", "spec.jsonl"], "near a question of these files were removed: mt.jsonl, spec"),
        ([], "Prompts were not compared with questions of any benchmark."),
        (None, "was not noted"),
    ],
)
def test_a_card_names_the_questions_that_prompts_were_kept_from(
    recipe: SimpleNamespace, wide: Any, noted: list[str] | None, said: str
) -> None:
    if noted is not None:
        wide.sources.write_text(json.dumps({"benchmarks": noted}))
    card = " ".join(recipe.wide_publish.card(wide).split())  # lines are wrapped
    assert said in card and "MT-Bench" not in card and "Spec-Bench" not in card
    if noted == []:
        with pytest.raises(SystemExit, match=r"from no questions.* name mt\.jsonl, spec\.jsonl"):
            recipe.wide_text.check_benchmarks(wide)
    else:
        recipe.wide_text.check_benchmarks(wide)


def test_a_process_renders_only_its_own_turns(
    recipe: SimpleNamespace, wide: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[str] = []
    turns: list[Any] = []
    text = recipe.wide_text
    monkeypatch.setattr(text, "open_engine", lambda settings: SimpleNamespace(prompts=None))
    monkeypatch.setattr(text, "turn_ids", lambda reader, said, words: rendered.append(words) or [])
    monkeypatch.setattr(text, "write_turns", lambda engine, own, *rest, **named: turns.extend(own))
    settings = replace(wide, processes=3, num_questions=30)
    text._tried(settings, 1)
    assert len(turns) == 10
    assert sorted(rendered) == sorted({turn.opening for turn in turns}), "each opening once"
    for part in (0, 2):
        text._tried(settings, part)
    assert sorted(turn.seed for turn in turns) == list(range(30)), "all parts together have all"
    temperatures = settings.question_temperatures
    assert all(turn.temperature == temperatures[turn.seed % 3] for turn in turns)
