"""The record of learned heads, and the folder around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.errors import ConfigError
from headstart.learn.folder import START, Folder, forget
from headstart.learn.heads import NEWEST, LearnedHeads
from headstart.learn.options import LearnOptions, key_name
from headstart.learn.status import lines


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    result = Folder(tmp_path / "learn")
    result.make(1.0)
    (result.heads / START).mkdir()
    return result


def add(heads: LearnedHeads, length: float) -> str:
    name = heads.next_name()
    heads.path(name).mkdir()
    heads.add(name, {"recent": {"new": length}})
    return name


def test_a_restart_goes_on_with_the_head_that_served(folder: Folder) -> None:
    heads = LearnedHeads(folder)
    assert heads.serving is None and heads.before == START
    first, second = add(heads, 1.5), add(heads, 1.6)
    heads.serve(first)
    heads.serve(second)
    again = LearnedHeads(folder)
    assert again.serving is not None and again.serving.name == second and again.before == first


def test_a_head_that_was_taken_back_never_serves_again(folder: Folder) -> None:
    heads = LearnedHeads(folder)
    first, second = add(heads, 1.5), add(heads, 1.6)
    heads.serve(first)
    heads.serve(second)
    heads.take_back(second, "too slow")
    again = LearnedHeads(folder)
    assert again.serving is not None and again.serving.name == first and again.before == START
    assert next(head for head in again.heads if head.name == second).note == "too slow"
    heads.take_back(first, "too")
    assert LearnedHeads(folder).serving is None


def test_a_refused_head_leaves_the_serving_one(folder: Folder) -> None:
    heads = LearnedHeads(folder)
    first = add(heads, 1.5)
    heads.serve(first)
    heads.take_back(add(heads, 2.0), "another geometry", "refused")
    serving = LearnedHeads(folder).serving
    assert serving is not None and serving.name == first


def test_what_a_killed_server_left_unfinished_is_cleared(folder: Folder) -> None:
    heads = LearnedHeads(folder)
    first = add(heads, 1.5)
    heads.serve(first)
    ready = add(heads, 1.6)  # killed before it served
    heads.path("0003").mkdir()  # killed before it was recorded
    again = LearnedHeads(folder)
    again.clear_unfinished()
    there = {path.name for path in folder.heads.iterdir() if path.is_dir()}
    assert there == {START, first}
    assert again.serving is not None and again.serving.name == first
    assert next(head for head in again.heads if head.name == ready).state == "refused"


def test_newest_few_and_best_are_kept(folder: Folder) -> None:
    heads = LearnedHeads(folder)
    names = [add(heads, length) for length in (1.1, 1.9, 1.2, 1.3, 1.4, 1.5)]
    for name in names:
        heads.serve(name)
    there = {path.name for path in folder.heads.iterdir() if path.is_dir()}
    assert there == {START, names[1], *names[-NEWEST:]}
    assert heads.next_name() == "0007", "a name is used once"


@pytest.mark.parametrize("found", ["{ half", "{}", '[{"name": "0001"}]', "[3]"])
def test_a_record_that_cannot_be_read_is_no_reason_to_remove_heads(
    folder: Folder, found: str
) -> None:
    folder.record.write_text(found)
    with pytest.raises(ConfigError, match=r"cannot be read .* Repair it"):
        LearnedHeads(folder)


def test_forgetting_removes_texts_and_says_that_heads_remain(folder: Folder) -> None:
    heads = LearnedHeads(folder)
    heads.serve(add(heads, 1.5))
    (folder.texts / "served-00000001.jsonl").write_text("x\n")
    assert "removed 1 file of" in (said := forget(folder, heads=False))
    assert "1 learned head remains" in said, "the first one is not learned"
    assert not list(folder.texts.iterdir()) and heads.path("0001").is_dir()
    assert "and 1 learned head" in forget(folder, heads=True)
    assert lines(folder)[-1] == "serving   no head is left"
    assert LearnedHeads(folder).serving is None and not list(folder.heads.iterdir())


def test_a_record_that_cannot_be_read_is_named_when_the_rest_is_forgotten(folder: Folder) -> None:
    heads = LearnedHeads(folder)
    heads.serve(add(heads, 1.5))
    (folder.texts / "served-00000001.jsonl").write_text("x\n")
    folder.record.write_text("{ half")
    folder.known.write_text("{ half")
    with pytest.raises(ConfigError, match=r"heads.json cannot be read and may hold first words"):
        forget(folder, heads=False)
    assert not list(folder.texts.iterdir()) and not folder.known.exists()
    assert heads.path("0001").is_dir()
    assert "and 1 learned head" in forget(folder, heads=True)
    assert LearnedHeads(folder).heads == []


def test_a_folder_in_use_is_not_forgotten(folder: Folder) -> None:
    with folder.lock(), pytest.raises(ConfigError, match="in use by a running server"):
        forget(folder, heads=False)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match="holds other files"):
        Folder(tmp_path).make(1.0)
    with pytest.raises(ConfigError, match="is not a folder of"):
        forget(Folder(tmp_path), heads=True)


def test_a_name_that_no_key_has_is_refused() -> None:
    options = LearnOptions(learn=Path("x"), learn_not_for=[key_name("secret")])
    options.check_names(("secret", "other"))
    with pytest.raises(ConfigError, match="the keys are key-"):
        options.check_names(("other",))
    with pytest.raises(ConfigError, match="without --learn"):
        LearnOptions(learn_base=Path("x"))


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", '{"written": "now"}', '{"written": 1, "seconds": null}'],
    ids=["cut off", "no object", "text", "null"],
)
def test_a_damaged_status_of_a_server_is_left_out(folder: Folder, text: str) -> None:
    plain = lines(folder)
    folder.status.write_text(text)
    assert lines(folder) == plain
