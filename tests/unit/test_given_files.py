"""Pipes, devices and endless files in the place of files: refused, wherever a command reads one."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import headstart
from headstart.bench.document import read_document
from headstart.data.conversations import read_conversations
from headstart.data.fingerprints import template_sha
from headstart.data.journal import read_journal
from headstart.errors import HeadstartError
from headstart.files import plain_lines, read_plain, read_text
from headstart.predict.vocab_choice import _text
from headstart.train.options import TrainOptions
from headstart.train.run_folder import Metrics
from headstart.train.states.journal import _read_journal
from headstart.train.variants import read_variants

PACKAGE = Path(headstart.__file__).parent
# These read files of Headstart itself, or of the system: nothing that was given.
OWN = {
    "server/page.py", "server/forks.py", "backends/host.py", "backends/numba/compiler.py",
    "bench/environment.py", "demo/shipped.py", "server/grammars/process.py",
}  # fmt: skip


def _template_sha(path: Path) -> str:
    checkpoint: Any = SimpleNamespace(folder=path.parent, tokenizer_documents=dict)
    return template_sha(checkpoint)


READERS: dict[str, Callable[[Path], object]] = {
    "old.json": read_document,
    "prompts.jsonl": read_conversations,
    "journal.jsonl": read_journal,
    "variants.json": lambda path: read_variants(path, TrainOptions()),
    "metrics.jsonl": lambda path: Metrics(path).lines(),
    "states.jsonl": lambda path: list(_read_journal(path)),
    "words.txt": _text,
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises((HeadstartError, OSError), match="it is not a plain file"):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize("name", READERS)
def test_a_device_is_refused_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "device").symlink_to("/dev/zero")
    with pytest.raises((HeadstartError, OSError), match="it is not a plain file"):
        READERS[name](tmp_path / "device")


def test_lines_and_files_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a\r\nbcd\nef")
    assert list(plain_lines(path, 5)) == [b"a\r\n", b"bcd\n", b"ef"]
    assert read_text(path) == "a\nbcd\nef"
    with pytest.raises(OSError, match="a line of more than 3 bytes"):
        list(plain_lines(path, 3))
    with pytest.raises(OSError, match="more than 8 bytes"):
        read_plain(path, 8)


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(HeadstartError, match="cannot be read"):
        _template_sha(tmp_path / "chat_template.jinja")


def test_files_that_are_given_are_read_with_care() -> None:
    """By headstart/files.py: only plain files, of bounded size."""
    careless = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if "read_text" in text or "read_bytes" in text:  # to parse all would take seconds
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            names = {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)}
            if names & {"read_text", "read_bytes"}:
                careless.add(path.relative_to(PACKAGE).as_posix())
    assert careless == OWN
