from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.checkpoint_files import make_folder

from headstart.checkpoint.reader import Checkpoint, torch_dtype
from headstart.checkpoint.values import load
from headstart.errors import BadConfig, CheckpointError, MissingTensor

ONE = {"model.safetensors": {"model.a.weight": b"123"}}


def hub_cache(tmp_path: Path, shards: dict[str, dict[str, bytes]]) -> Path:
    """The same files as links into a folder of blobs, as the hub client lays them out."""
    real = make_folder(tmp_path / "plain", shards, index=True)
    cache = tmp_path / "models--x--y"
    blobs, snapshot = cache / "blobs", cache / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(real.iterdir())):
        path.rename(blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    return snapshot


def test_a_hub_cache_of_links_is_read_as_it_is(tmp_path: Path) -> None:
    folder = hub_cache(tmp_path, {"a.safetensors": {"a": b"1"}, "b.safetensors": {"b": b"2"}})
    checkpoint = Checkpoint.open(folder)
    assert bytes(load(checkpoint.source("b")).numpy()) == b"2"
    assert checkpoint.info("a").file.name == "a.safetensors"
    assert list(checkpoint.index.shards) == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize("path", ["gone", "x" * 300, "file/inside"])
def test_a_folder_that_is_not_there_says_so(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="does not exist; expected the folder"):
        Checkpoint.open(tmp_path / path)


def test_a_file_in_place_of_a_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is not a folder; expected the folder"):
        Checkpoint.open(tmp_path / "file")


def test_an_unknown_tensor_is_refused_with_near_names(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_folder(tmp_path / "m", ONE))
    with pytest.raises(MissingTensor, match=r"no tensor 'a\.bias'. Near names: model\.a\.weight"):
        checkpoint.info("a.bias")
    with pytest.raises(MissingTensor, match="no tensor 'plain'"):
        checkpoint.info("plain")


def test_files_of_sub_folders_are_found_and_those_of_other_formats_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", ONE)
    wanted = {"tokenizer.json", "encoding/x.py", "encoding/deep/config.json", "linked/y"}
    foreign = {"pytorch_model.bin", "original/consolidated.00.pth", "x.gguf"}
    hidden = {".git/config", ".cache/a", "encoding/.hidden"}
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "y").write_text("y")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    for name in [*wanted, *foreign, *hidden]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name[-1])
    checkpoint = Checkpoint.open(folder)
    assert set(checkpoint.files_below()) == wanted
    assert set(checkpoint.foreign_weights()) == foreign
    assert all(path.read_text() == n[-1] for n, path in checkpoint.files_below().items())


@pytest.mark.parametrize("target", ["..", ".", "../..", "../other"])
def test_links_that_lead_back_are_not_followed_for_ever(tmp_path: Path, target: str) -> None:
    folder = make_folder(tmp_path / "m", ONE)
    for name, back in (("sub", target), ("other", "../sub")):
        (folder / name).mkdir()
        (folder / name / "file").write_text("")
        (folder / name / "loop").symlink_to(back)
    found = set(Checkpoint.open(folder).files_below())
    assert {"sub/file", "other/file"} <= found
    assert len(found) <= 6


def test_side_files_are_what_is_not_weights_and_not_rewritten(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", ONE)
    wanted = {"tokenizer.json", "LICENSE", "generation_config.json", "modeling_x.py"}
    for name in wanted | {
        "pytorch_model.bin", "pytorch_model.bin.index.json", ".gitattributes", "headstart.json",
    }:  # fmt: skip
        (folder / name).write_text("{}")
    (folder / "original").mkdir()
    assert {path.name for path in Checkpoint.open(folder).side_files()} == wanted


def test_a_generation_config_is_read_when_asked_for(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", ONE)
    assert Checkpoint.open(folder).generation_config == {}
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 3}))
    assert Checkpoint.open(folder).generation_config == {"top_k": 3}
    (folder / "generation_config.json").write_text("[")
    with pytest.raises(BadConfig, match=r"generation_config\.json cannot be read as JSON"):
        _ = Checkpoint.open(folder).generation_config


def test_a_dtype_that_torch_lacks_is_refused() -> None:
    with pytest.raises(CheckpointError, match="dtype F4 cannot be held by torch"):
        torch_dtype("F4")
