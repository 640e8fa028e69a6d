"""The record of learned heads, and the folder around it."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest

from headstart.errors import ConfigError, WriteFailed
from headstart.learn import folder as folder_module
from headstart.learn import heads as heads_module
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


def test_heads_that_are_refused_do_not_pile_up(folder: Folder) -> None:
    heads = LearnedHeads(folder)
    for _ in range(3):
        heads.take_back(add(heads, 2.0), "another geometry", "refused")
    assert {path.name for path in folder.heads.iterdir() if path.is_dir()} == {START}


def test_the_record_does_not_grow_without_end(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads_module, "_LINES", 5)
    heads = LearnedHeads(folder)
    for number in range(12):
        heads.serve(add(heads, 9.0 if number == 2 else 1.0))
    heads.note_live("0012", {"new": 1.0})
    again = LearnedHeads(folder)
    assert [head.name for head in again.heads] == ["0003", "0008", "0009", "0010", "0011", "0012"]
    assert again.next_name() == "0013"


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


def test_a_serving_head_that_somebody_removed_gives_way_to_the_one_before(folder: Folder) -> None:
    """Regression: the server did not start."""
    heads = LearnedHeads(folder)
    names = [add(heads, 1.5), add(heads, 1.6)]
    for name in names:
        heads.serve(name)
    shutil.rmtree(heads.path(names[1]))
    LearnedHeads(folder).clear_unfinished()
    serving = LearnedHeads(folder).serving
    assert serving is not None and serving.name == names[0]


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


def test_a_first_start_that_was_killed_leaves_a_folder_for_the_next_one(tmp_path: Path) -> None:
    """Regression: it held folders and not yet the page, so it was somebody else's."""
    path = tmp_path / "learn"
    path.mkdir()
    (path / ".WHAT-IS-KEPT.txt.partial-0a0b0c0d").touch()
    Folder(path).make(1.0)
    assert {own.name for own in path.iterdir()} >= {"texts", "states", "heads", "WHAT-IS-KEPT.txt"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_start_goes_on_with_a_full_disk_and_a_first_one_does_not(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = LearnedHeads(folder)
    ready = add(heads, 1.6)  # killed before it served

    def full(*given: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module, "write_whole", full)
    monkeypatch.setattr(heads_module, "write_whole", full)
    folder.make(2.0)
    again = LearnedHeads(folder)
    again.clear_unfinished()
    assert again.serving is None and not heads.path(ready).exists()
    with pytest.raises(WriteFailed, match="No space left"):
        Folder(tmp_path / "new").make(1.0)


def test_a_folder_that_cannot_be_locked_is_an_error_in_words(folder: Folder) -> None:
    (folder.path / ".lock").mkdir()
    with pytest.raises(WriteFailed, match="cannot be written"):
        folder.lock()


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
