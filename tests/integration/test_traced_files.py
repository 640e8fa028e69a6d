"""A request runs few files: what a reader of the server must open is held by these numbers."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from support.server_runs import served, write_tokenizer
from support.tiny_fixture import Tiny

import headstart

sys.path.insert(0, str(Path(headstart.__file__).parent.parent / "scripts"))
from traced_files import Tracer, chat_files, generate_files

SETTINGS: dict[str, Any] = {
    "device": "cpu", "speculate": 3, "dtype": "float32", "threads": 1, "kv_bytes": 1 << 23,
}  # fmt: skip
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
# From the connection to the log line, in the order in which a chat request meets them.
SERVER = {
    "server/wire.py", "server/access.py", "server/preparation.py", "server/channels.py",
    "server/intake.py", "server/protocol/base.py", "server/protocol/messages.py",
    "server/protocol/requests.py", "server/refusals.py", "server/answering.py",
    "server/templates/client.py", "server/worker.py", "server/answers/writer.py",
    "server/answers/logprobs.py",
    "server/recording.py",
}  # fmt: skip
# What a prompt meets on its way through the engine, on a CPU with the compiled kernels.
ENGINE = {
    "data/prompt_reader.py", "data/detokenizer.py",
    "engine/engine.py", "engine/admission.py", "engine/request.py", "engine/loop.py",
    "engine/scheduler.py",
    "engine/kv_cache.py", "engine/auto/policy.py", "engine/drafter.py",
    "engine/draft_sources.py", "engine/copies.py", "engine/auto/rates.py",
    "engine/auto/exploration.py", "engine/auto/copies.py", "engine/auto/copied_rounds.py",
    "engine/verifier.py", "engine/output.py", "engine/groups.py", "engine/stats.py",
    "engine/head_progress.py", "sampling/params.py", "sampling/checks.py",
    "backends/base.py", "backends/numba/backend.py", "backends/numba/row_layouts.py",
    "backends/numba/forward.py", "backends/numba/layers.py", "backends/numba/thread_pool.py",
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


@pytest.mark.usefixtures("logging_as_before")
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_chat_request_runs_the_files_of_the_architecture_page(
    plain_chat: str, is_stream: bool
) -> None:
    files = chat_files(plain_chat, is_stream=is_stream, **SETTINGS)
    assert of("server", files) == SERVER
    assert set(files) == SERVER | ENGINE
    assert len(files) <= 44


def test_generate_runs_few_files(plain_chat: str, capsys: pytest.CaptureFixture[str]) -> None:
    files = generate_files(plain_chat, **SETTINGS)
    assert "16 tokens" in capsys.readouterr().err
    own = {"cli/main.py", "cli/generate.py", "sampling/acceptance.py"}  # it says how much fitted
    first = {"backends/numba/held.py"}  # the LM head of the first drafts
    assert set(files) == ENGINE | own | first
    assert len(files) <= 33


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
