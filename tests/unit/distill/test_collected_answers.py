"""A dataset of collected answers: what is read of their files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headstart.distill import collected
from headstart.errors import DataError
from headstart.vllm_plugin.collected import Collected, write

READER: Any = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An answer, and a file behind it that is none."""
    write(tmp_path, "a", Collected(torch.arange(4, dtype=torch.int32), torch.ones(4, 2), 3))
    (tmp_path / "b.safetensors").write_text("no")
    return tmp_path


def test_only_so_many_files_are_read(folder: Path) -> None:
    (found,) = collected.conversations(folder, READER, 1)
    assert (found.id, found.messages[0]["content"]) == ("a", "0 1 2")
    with pytest.raises(DataError, match="is no collected answer"):
        collected.conversations(folder, READER, 2)


def test_states_stay_in_their_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Collected] = []

    def read(*args: Any, **options: Any) -> Collected:
        found.append(stock(*args, **options))
        return found[-1]

    stock = collected.read
    monkeypatch.setattr(collected, "read", read)
    (conversation,) = collected.conversations(folder, READER, 1)
    dialogue: Any = SimpleNamespace(
        conversation=conversation, turns_left=1, prompt_sha="", user="0 1 2"
    )
    collected.Importer(folder, READER, 9).ask([dialogue], lambda answer: None)
    assert [one.states.is_meta for one in found] == [True, True]
