from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from headstart.checkpoint.hub import local_folder
from headstart.errors import CheckpointError


def fake_hub(monkeypatch: pytest.MonkeyPatch, download: object) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=download))


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert local_folder(tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["./gone", "a/b/c", "/tmp/gone-x/y", "x" * 300])
def test_what_is_no_hub_name_is_left_to_the_reader(name: str) -> None:
    assert local_folder(name) == Path(name)


def test_a_hub_name_is_downloaded_without_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.extend([name, *allow_patterns])
        return "/cache/x"

    fake_hub(monkeypatch, download)
    assert local_folder("org/model") == Path("/cache/x")
    assert asked[0] == "org/model"
    assert "*.safetensors" in asked
    assert not any("bin" in str(pattern) for pattern in asked)


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise RuntimeError("no route\nmore lines")

    fake_hub(monkeypatch, download)
    with pytest.raises(
        CheckpointError, match=r"could not be fetched.*\(no route\)\. Give the path"
    ):
        local_folder("org/model")
