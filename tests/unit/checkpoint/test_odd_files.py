"""Pipes, devices and endless files in a checkpoint are refused, not waited for."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from support.checkpoint_files import make_folder

from headstart.checkpoint.config import read_json_object
from headstart.checkpoint.index import INDEX_NAME
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import BadConfig, CheckpointError
from headstart.files import read_plain


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
@pytest.mark.parametrize("name", ["config.json", INDEX_NAME, "tokenizer.json", "x.safetensors"])
def test_what_is_no_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    folder = make_folder(tmp_path / "m", {"model.safetensors": {"model.a.weight": b"123"}})
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "device":
        (folder / name).symlink_to("/dev/zero")
    else:
        monkeypatch.chdir(folder)  # names of sockets must be short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(name)
    with pytest.raises(CheckpointError, match=f"{name} is neither a file nor a folder"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_document_by_itself_is_not_waited_for_either(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "config.json"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(BadConfig, match="it is not a plain file"):
        read_json_object(path)


def test_a_file_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # takes no space
    with pytest.raises(BadConfig, match="it has more than 268,435,456 bytes"):
        read_json_object(path)
    path.write_bytes(b"12345")
    assert read_plain(path, 5) == b"12345"
    with pytest.raises(OSError, match="it has more than 4 bytes"):
        read_plain(path, 4)
