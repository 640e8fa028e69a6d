from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.checkpoint_files import make_folder

from headstart.checkpoint.provenance import (
    PROVENANCE_NAME,
    digest,
    model_of,
    provenance,
    read_provenance,
)
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import BadConfig, BrokenFile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "m", {"model.safetensors": {"a": b"123"}})


def test_it_says_what_was_done_to_what(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/headstart", "export", "my model"])
    document = provenance("export", [Checkpoint.open(folder)], changes=["x"], format="xllm")
    assert document["command"] == "headstart export 'my model'"
    assert document["sources"][0]["path"] == str(folder)
    assert document["changes"] == ["x"]
    assert document["format"] == "xllm"


def test_the_digest_changes_with_config_names_and_bytes(folder: Path, tmp_path: Path) -> None:
    def of(name: str, **options: object) -> str:
        tensors = options.pop("tensors", {"a": b"123"})
        made = make_folder(tmp_path / name, {"model.safetensors": tensors}, **options)
        return digest(Checkpoint.open(made))

    same = digest(Checkpoint.open(folder))
    assert of("same") == same
    others = [
        of("config", config={"x": 1}),
        of("bytes", tensors={"a": b"124"}),
        of("name", tensors={"b": b"123"}),
    ]
    assert len({same, *others}) == 4


def test_a_source_that_vanished_is_an_error_of_ours(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(BrokenFile, match=r"model\.safetensors cannot be read"):
        digest(checkpoint)


def test_reading_it_back_gives_an_object_or_nothing(tmp_path: Path) -> None:
    assert read_provenance(tmp_path) == {}
    (tmp_path / PROVENANCE_NAME).write_text(json.dumps({"a": 1}))
    assert read_provenance(tmp_path) == {"a": 1}
    (tmp_path / PROVENANCE_NAME).write_text("[]")
    with pytest.raises(BadConfig, match=r"headstart\.json holds a JSON list"):
        read_provenance(tmp_path)


@pytest.mark.parametrize(
    ("document", "model"),
    [
        ({"of_model": "org/name", "operation": "convert"}, "org/name"),
        ({"operation": "export", "sources": [{"path": "m"}]}, "m"),
        ({"operation": "convert", "sources": [{"path": "m"}]}, None),
        ({"of_model": 3, "operation": "export", "sources": [{"path": 5}]}, None),
        *[({"operation": "export", "sources": odd}, None) for odd in (None, {}, [], [3], [{}])],
    ],
    ids=str,
)
def test_whose_head_it_is_is_known_or_not(
    tmp_path: Path, document: dict[str, object], model: str | None
) -> None:
    assert model_of(tmp_path) is None
    (tmp_path / "headstart.json").write_text(json.dumps(document))
    assert model_of(tmp_path) == model
