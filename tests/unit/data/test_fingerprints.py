"""Hashes change with what they stand for, and with nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.tiny_fixture import Tiny

from headstart.checkpoint.reader import Checkpoint
from headstart.data.fingerprints import (
    ABSENT,
    is_heldout,
    prompt_sha,
    template_sha,
    tokenizer_sha,
)


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("llama", with_head=False), tmp_path / "m"))


def test_saving_a_tokenizer_again_does_not_change_it(folder: Path) -> None:
    before = tokenizer_sha(Checkpoint.open(folder))
    path = folder / "tokenizer.json"
    document = {**json.loads(path.read_text()), "padding": {"length": 5}, "truncation": {"x": 1}}
    path.write_text(json.dumps(document, indent=4))
    assert tokenizer_sha(Checkpoint.open(folder)) == before
    document["model"]["vocab"]["t5"] = 6
    path.write_text(json.dumps(document))
    assert tokenizer_sha(Checkpoint.open(folder)) != before


def test_a_template_is_found_in_both_places(folder: Path) -> None:
    assert template_sha(Checkpoint.open(folder)) == ABSENT
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": "{{ x }}"}))
    inside = template_sha(Checkpoint.open(folder))
    (folder / "chat_template.jinja").write_text("{{ x }}")
    assert template_sha(Checkpoint.open(folder)) == inside != ABSENT
    (folder / "chat_template.jinja").write_text("{{ y }}")
    assert template_sha(Checkpoint.open(folder)) != inside


def test_answers_do_not_belong_to_a_prompt() -> None:
    question = {"role": "user", "content": "q"}
    answered = [question, {"role": "assistant", "content": "a"}]
    assert prompt_sha([question]) == prompt_sha(answered)
    assert prompt_sha([question]) != prompt_sha([question, question])


def test_the_held_out_share_is_what_was_asked_for_and_grows_by_adding() -> None:
    hashes = [prompt_sha([{"role": "user", "content": str(i)}]) for i in range(4000)]
    few = {sha for sha in hashes if is_heldout(sha, 0.05)}
    more = {sha for sha in hashes if is_heldout(sha, 0.2)}
    assert few < more
    assert len(few) == pytest.approx(200, abs=50)
    assert not any(is_heldout(sha, 0) for sha in hashes)
    assert all(is_heldout(sha, 1) for sha in hashes)
