"""The wider recipe of the demo's head: passages, tasks, filters and pieces, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.demo_recipe import recipe_modules

from headstart.data.records import Record

NAMES = ("passages", "kinds", "overlap", "own_questions", "collect", "carry")
PROSE = (
    "The harbour of the town was built in the last century, and it is still used by boats that "
    "carry salt and timber to the islands. Visitors like to walk along the wall in the evening."
)
FRENCH = (
    "Le port de la ville est utilisé par les bateaux qui transportent le sel et le bois vers les "
    "îles, et les visiteurs se promènent sur le quai dans la soirée avec leurs enfants. "
)
GERMAN = (
    "Der Hafen der Stadt ist nicht groß, und die Schiffe werden von den Leuten auf der Insel mit "
    "Holz und Salz beladen, das sie im Winter für das Dorf brauchen."
)


@pytest.fixture(scope="module")
def recipe() -> Iterator[SimpleNamespace]:
    with recipe_modules(*NAMES) as modules:
        yield modules


def some_passages(recipe: SimpleNamespace, count: int = 400) -> list[object]:
    return [
        recipe.passages.Passage(
            f"{PROSE} Berth number {i} is for Captain Miller.", "en", False, "a"
        )
        for i in range(count)
    ]


def test_languages_are_told_apart_and_noise_is_none(recipe: SimpleNamespace) -> None:
    found = [recipe.passages.language_of(text) for text in (PROSE, FRENCH, GERMAN)]
    assert found == ["en", "fr", "de"]
    assert recipe.passages.language_of("xq zzv 4711 lorem kwyx brrt grmpf") is None


def test_paragraphs_of_pages_and_texts_become_passages_once(recipe: SimpleNamespace) -> None:
    page = (
        f"<body><p>{PROSE}</p><pre>ls -l /tmp</pre><ul><li><p>{PROSE[::-1]}</p></li></ul>"
        "<table><tr><td><p>| a | b |</p></td></tr></table><p>Short.</p></body>"
    )
    assert recipe.passages.page_paragraphs(page)[0] == PROSE
    found = [*recipe.passages.passages_of("a.html", page, "pkg")]
    found += recipe.passages.passages_of("b.html", f"<p>{FRENCH}{FRENCH}</p>", "pkg")
    assert [(p.language, p.is_code) for p in found] == [("en", False), ("fr", False)]
    assert found[0].text == PROSE
    plain = f"{PROSE}\n\n    x = 1\n  y = 2\n\n{PROSE}\n"
    assert all("x = 1" not in p.text for p in recipe.passages.passages_of("a.txt", plain, "pkg"))


def test_functions_are_cut_out_whole(recipe: SimpleNamespace) -> None:
    body = "\n".join(f"        total += values[{i}] * weights[{i}]" for i in range(8))
    begins, ends = (
        "    def total(self, values, weights):\n        total = 0",
        "        return total",
    )
    source = f"class A:\n{begins}\n{body}\n{ends}\n"
    (found,) = recipe.passages.passages_of("a.py", source, "pkg")
    assert found.text.startswith("def total(") and found.text.endswith("    return total")
    assert (found.language, found.is_code) == ("python", True)
    assert not list(recipe.passages.passages_of("a.py", "def broken(:\n" * 9, "pkg"))
    lines = "\n".join(f"\tif a == {i} {{\n\t\treturn {i * 100000}\n\t}}" for i in range(6))
    go = f"package p\n\nfunc Pick(a int) int {{\n{lines}\n\treturn a\n}}\n\nvar x = 1\n"
    (picked,) = recipe.passages.passages_of("a.go", go, "pkg")
    assert picked.text.startswith("func Pick") and picked.text.endswith("\n}")


def test_what_is_held_out_depends_on_the_passage_alone(recipe: SimpleNamespace) -> None:
    found = list(recipe.kinds.tasks(some_passages(recipe)))
    splits = {
        split: [t for t in found if t.split == split] for split in ("test", "validation", "train")
    }
    share = len(splits["test"]) / len(found)
    assert all(splits.values()) and 0.01 < share < 0.06, "about 3 %"
    low = [p for p in some_passages(recipe, 2000) if p.sha < "1"]
    assert {t.split for t in recipe.kinds.tasks(low)} >= {"train"}, "whichever passages were chosen"
    assert all(splits.values()) and len(splits["train"]) > 10 * len(splits["test"])
    again = list(recipe.kinds.tasks(list(reversed(some_passages(recipe)))))
    assert sorted(t.id for t in again) == sorted(t.id for t in found)
    passage = some_passages(recipe, 1)[0]
    spaced = recipe.passages.Passage(passage.text.replace(" ", "  ").upper(), "en", False, "b")
    assert spaced.sha == passage.sha


def test_held_out_tasks_have_words_of_their_own(recipe: SimpleNamespace) -> None:
    for kind, (wordings, heldout) in recipe.kinds._WORDINGS.items():
        assert heldout not in wordings and all("{}" in words for words in wordings), kind
    tasks = list(recipe.kinds.tasks(some_passages(recipe)))
    tested = [t.turns[0] for t in tasks if t.split == "test"]
    assert all(len(t.turns) == 1 for t in tasks if t.split == "test")
    for words in ("In a few sentences, say what it comes down to", "I need this passage in"):
        assert any(words in text for text in tested)
        assert not any(words in t.turns[0] for t in tasks if t.split != "test")
    assert {t.category for t in tasks} == {"summary", "answer", "translation", "rewriting"}
    assert all("{" not in t.turns[0] for t in tasks), "every place is filled"


def test_prompts_near_a_question_are_found(recipe: SimpleNamespace) -> None:
    asked = "Compose a letter to the mayor in which you complain about the noise of the harbour."
    questions = recipe.overlap.Questions([asked, "Name ten rivers."])
    assert questions.is_near(asked) and questions.is_near("name TEN rivers")
    assert questions.is_near("Please compose a letter to the mayor in which you praise the noise.")
    assert not questions.is_near("Compose a poem about the harbour of a small town at night.")
    assert not questions.is_near(
        "Name ten rivers that flow through more than three countries of Asia."
    )


@pytest.mark.parametrize(
    ("question", "is_whole", "fault"),
    [
        ("How can I prepare for a job interview in a foreign language?", True, None),
        ("How can I prepare for a job interview in a foreign", False, "cut off"),
        ("Why?", True, "short"),
        ("Tell me more.<|im_start|>", True, "marks"),
        ("Can you help me with my garden?\nOf course, I am happy to help you.", True, "answers"),
        ("please tell me why " * 12, True, "loops"),
        ("qzx vvbn plkj mnbv trew yuio poiu asdf ghjk lzxc", True, "no language"),
        ("12 + 34 = 46, 56 - 12 = 44, 1 2 3 4", True, "no words"),
        ("Fix this code:\n```\nx = [1, 2, 3]\nprint(x[3])\n```", True, None),
    ],
)
def test_questions_are_judged(
    recipe: SimpleNamespace, question: str, is_whole: bool, fault: str | None
) -> None:
    found = recipe.own_questions.fault_of(question, is_whole=is_whole)
    assert found is None if fault is None else found is not None and fault in found


def test_questions_are_kept_once_and_counted(recipe: SimpleNamespace) -> None:
    good = "How do I keep bread fresh for more than two days without a freezer?"
    tried = [
        (good, True), (good.upper(), True), (good.replace("?", " today?"), True), ("Why?", True),
        ("What is the capital of the country that I was born in?", True),
    ]  # fmt: skip
    avoided = recipe.overlap.Questions(["What is the capital of the country that won the cup?"])
    kept = recipe.own_questions.kept_of(tried, avoided)
    assert kept.questions == [good]
    assert dict(kept.dropped) == {
        "said before": 1, "short": 1, "near a benchmark's question": 1, "nearly said before": 1,
    }  # fmt: skip
    assert "1 kept" in kept.describe()
    assert list(recipe.own_questions.openings(("A", "B"), 6)) == ["", "A", "", "B", "", "A"]


def test_archives_are_cut_and_put_together(recipe: SimpleNamespace, tmp_path: Path) -> None:
    import io
    import tarfile

    (tmp_path / "model.gguf").write_bytes(bytes(range(256)) * 900)
    pieces = recipe.carry.cut([tmp_path / "model.gguf"], tmp_path / "carry", 100_000)
    assert [p.name for p in pieces] == ["piece-00", "piece-01", "piece-02"]
    assert max(p.stat().st_size for p in pieces) <= 100_000
    with tarfile.open(fileobj=io.BytesIO(b"".join(p.read_bytes() for p in pieces))) as archive:
        member = archive.extractfile("model.gguf")
        assert member is not None and member.read() == (tmp_path / "model.gguf").read_bytes()


def test_text_comes_home_as_it_was(
    recipe: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstart.data.dataset import Dataset, Header, write_dataset

    drawn = np.random.default_rng(5)

    def record(i: int) -> Record:
        ids = drawn.integers(0, 900, 60).astype(np.int32)
        return Record(
            id=f"p{i // 2}/t0/s{i % 2}", prompt_id=f"p{i // 2}", category="c", turn=0, sample=i % 2,
            ids=ids, mask=np.arange(60) >= 20, seed=None, sampling={"temperature": 0.0},
            finish_reason="stop", exact_ids=True, num_prompt=20, max_tokens=64,
        )  # fmt: skip

    header = Header(
        origin="engine", trunk_digest="t", tokenizer_sha="s", template_sha="x", vocab_size=1000,
        hidden_size=8, sampling={"temperature": 0.0}, seed=0, chat_template_kwargs={}, counts={},
        report={},
    )  # fmt: skip
    splits = {"train": [record(i) for i in range(400)], "heldout": [record(900)]}
    (tmp_path / "answers").mkdir()
    write_dataset(tmp_path / "answers", header, splits)
    said = recipe.carry.pack_text(tmp_path / "answers", tmp_path / "home")
    assert said.startswith("60 of 60 chunks")
    assert len(list((tmp_path / "home").iterdir())) == 4
    found, again = recipe.carry.unpack_text(tmp_path / "home")
    assert found.stamp == Dataset.open(tmp_path / "answers").header.stamp
    whole = {r.id: (r.ids.tolist(), r.mask.tolist()) for part in splits.values() for r in part}
    assert {r.id: (r.ids.tolist(), r.mask.tolist()) for p in again.values() for r in p} == whole
    monkeypatch.setattr(recipe.carry, "_TEXT_BYTES", 20_000)
    for path in (tmp_path / "home").iterdir():
        path.unlink()
    part = recipe.carry.pack_text(tmp_path / "answers", tmp_path / "home")
    kept = int(part.split()[0])
    assert 0 < kept < 60
    _, some = recipe.carry.unpack_text(tmp_path / "home")
    assert 0 < len(some["train"]) < 400 and {r.id for r in some["train"]} <= set(whole)
