"""A request runs few files: what a reader of the server must open is held by these numbers."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from server_runs import served, write_tokenizer
from tiny_fixture import Tiny

import headstart

sys.path.insert(0, str(Path(headstart.__file__).parent.parent / "scripts"))
from traced_files import Tracer, chat_files, generate_files

SETTINGS: dict[str, Any] = {
    "device": "cpu", "speculate": 3, "dtype": "float32", "threads": 1, "kv_bytes": 1 << 23,
}  # fmt: skip
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
# From the connection to the log line, in the order in which a chat request meets them.
SERVER = {
    "server/wire.py", "server/app.py", "server/bodies.py", "server/protocol/sampling.py",
    "server/protocol/chat.py", "server/state.py", "server/answering.py", "server/worker.py",
    "server/metrics/recorder.py", "server/answers/writer.py", "server/answers/chat.py",
    "server/logs.py",
}  # fmt: skip


def of(package: str, files: list[str]) -> set[str]:
    return {file for file in files if file.startswith(f"{package}/")}


@pytest.fixture(scope="module")
def plain_chat(tiny: Tiny) -> str:
    """A model whose template knows neither tools nor thinking."""
    folder = served(tiny)
    out = folder.parent / f"{folder.name}-plain-chat"
    shutil.copytree(folder, out)
    write_tokenizer(out, TEMPLATE)
    return str(out)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_chat_request_runs_twelve_files_of_the_server(plain_chat: str, is_stream: bool) -> None:
    files = chat_files(plain_chat, is_stream=is_stream, **SETTINGS)
    assert of("server", files) == SERVER and len(SERVER) == 12
    assert of("engine", files), "the engine's thread was seen, too"


def test_generate_runs_three_files_of_the_command_line(
    plain_chat: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = generate_files(plain_chat, **SETTINGS)
    assert "16 tokens" in capsys.readouterr().err
    assert of("cli", files) == {"cli/main.py", "cli/generate.py", "cli/chat.py"}
    assert not of("server", files) and not of("checkpoint", files)


def test_imports_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "headstart.server.tools.formats", raising=False)
    tracer = Tracer()
    with tracer.installed():
        tracer.begin()
        from headstart.server.tools.formats import tool_format

        imported = tracer.end()
        tracer.begin()
        tool_format("hermes", None)
        called = tracer.end()
    assert imported == [] and called == ["server/tools/formats.py"]
