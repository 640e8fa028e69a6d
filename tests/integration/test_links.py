"""Links in a checkpoint: followed inside it and into its hub cache, refused elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.commands import headstart
from support.tiny_fixture import Tiny

from headstart.checkpoint.reader import Checkpoint
from headstart.errors import CheckpointError
from headstart.heads.export import plan_export
from headstart.heads.head import head_of


@pytest.fixture
def model(tiny: Tiny, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("mimo", dtype="F32"), tmp_path / "model"))


def as_snapshot(model: Path, cache: Path) -> Path:
    """The same files as links into the blobs of a hub cache."""
    blobs, snapshot = cache / "blobs", cache / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(model.iterdir())):
        path.rename(blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number:040x}")
    return snapshot


@pytest.mark.parametrize("name", ["LICENSE", "sub/notes.txt", "more.safetensors", "config.json"])
def test_a_link_that_leads_outside_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    (model / "sub").mkdir()
    if (model / name).exists():
        (model / name).rename(secret)
    elif name.endswith("safetensors"):
        shutil.copy(next(model.glob("*.safetensors")), secret)
    else:
        secret.write_text("a key")
    (model / name).symlink_to(secret)
    for more in ((), ("--dry-run",)):
        done = headstart("export", str(model), "--out", str(tmp_path / "out"), *more)
        assert done.returncode == 1
        assert f"{name} is a link to {secret}, outside the checkpoint" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not (tmp_path / "out").exists()


def test_a_folder_that_is_a_link_is_one(model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "id").write_text("a key")
    (model / "encoding").symlink_to(tmp_path / "keys")
    with pytest.raises(CheckpointError, match=r"encoding/id is a link to .*keys/id, outside"):
        plan_export(head_of(Checkpoint.open(model)), "headstart").write(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_inside_are_followed_and_shown(model: Path, tmp_path: Path) -> None:
    (model / "LICENSE.txt").write_text("free")
    (model / "LICENSE").symlink_to("LICENSE.txt")
    linked = tmp_path / "by another name"
    linked.symlink_to(model)
    shown = headstart("export", str(linked), "--dry-run")
    assert f"links followed in {linked}: LICENSE -> LICENSE.txt\n" in shown.stdout
    done = headstart("export", str(linked), "--out", str(tmp_path / "out"), "--json")
    assert json.loads(done.stdout)["links"] == {str(linked): {"LICENSE": "LICENSE.txt"}}
    assert (tmp_path / "out" / "LICENSE").read_text() == "free"
    assert not (tmp_path / "out" / "LICENSE").is_symlink()


def test_snapshots_of_a_hub_cache_are_followed_into_their_own_blobs_only(
    model: Path, tmp_path: Path
) -> None:
    snapshot = as_snapshot(model, tmp_path / "models--a--b")
    out = tmp_path / "out"
    plan_export(head_of(Checkpoint.open(snapshot)), "headstart").write(out)
    assert (out / "tokenizer.json").read_bytes() == (snapshot / "tokenizer.json").read_bytes()
    other = tmp_path / "models--c--d" / "blobs" / "1"
    other.parent.mkdir(parents=True)
    other.write_text("of a private model")
    (snapshot / "LICENSE").symlink_to(other)
    with pytest.raises(CheckpointError, match=r"LICENSE is a link to .*models--c--d/blobs/1"):
        Checkpoint.open(snapshot).links()


def test_blobs_that_are_a_link_are_not_the_caches_own(model: Path, tmp_path: Path) -> None:
    snapshot = as_snapshot(model, tmp_path / "models--a--b")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.rename(tmp_path / "keys")
    blobs.symlink_to(tmp_path / "keys")
    with pytest.raises(CheckpointError, match=r"is a link to .*keys/0+, outside the checkpoint"):
        Checkpoint.open(snapshot).links()
