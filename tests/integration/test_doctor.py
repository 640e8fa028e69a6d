"""The doctor beside real processes: our server with heads in four states, and `launch --run`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.commands import headstart
from support.engine_records import records
from support.engine_runs import greedy, run, start
from support.head_edits import edited, head_names
from support.server_runs import VOCAB, running, served
from support.tiny_fixture import Tiny

from headstart.checkpoint.reader import Checkpoint
from headstart.data.dataset import Header, write_dataset
from headstart.data.fingerprints import template_sha, tokenizer_sha
from headstart.heads.digest import trunk_digest

Tensors = dict[str, torch.Tensor]
_SECONDS = 30


@pytest.fixture(scope="module")
def healthy(tiny: Tiny) -> Path:
    return served(tiny)


@pytest.fixture(scope="module")
def promise(healthy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `headstart score` says about the head on answers of its own model."""
    params = greedy(48)
    engine = start(healthy, speculate=0)
    prompts = [[6 + 7 * i, 40 + 3 * i, 90 + i, 11] for i in range(12)]
    made = [replace(r, category="a") for r in records(run(engine, prompts, params), params)]
    opened, folder = Checkpoint.open(healthy), tmp_path_factory.mktemp("promise")
    header = Header(
        origin="engine", trunk_digest=trunk_digest(opened), tokenizer_sha=tokenizer_sha(opened),
        template_sha=template_sha(opened), vocab_size=VOCAB, hidden_size=256, seed=0,
        chat_template_kwargs={}, sampling=made[0].sampling, counts={}, report={},
    )  # fmt: skip
    write_dataset(folder, header, {"heldout": made})
    words = ("--data", str(folder), "--dtype", "float32", "--bandwidth", "50", "--json")
    done = headstart("score", str(healthy), *words)
    assert done.returncode == 0, done.stderr
    file = folder / "score.json"
    file.write_text(done.stdout)
    return file


def zeroed(contents: Tensors, head: dict[str, str]) -> None:
    for name in head.values():
        contents[name].zero_()


def exchanged(contents: Tensors, head: dict[str, str]) -> None:
    name = head["modules.0.fuse.weight"]
    contents[name] = torch.cat(list(contents[name].chunk(2, dim=1))[::-1], dim=1)


def other_fine_tune(contents: Tensors, head: dict[str, str]) -> None:
    """The head stays as it was trained, and the trunk's layers go on to something else."""
    draw = torch.Generator().manual_seed(0)
    for name, value in contents.items():
        if ".layers." in name and value.ndim == 2 and name not in head.values():
            value += 1.4 * value.std() * torch.randn(value.shape, generator=draw)


@pytest.mark.parametrize(
    ("change", "verdict", "alone"),
    [
        (None, "healthy", "healthy"),
        (zeroed, "dead", "dead"),
        (exchanged, "below", "low"),
        (other_fine_tune, "below", "healthy"),  # without a promise there is nothing to miss
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_heads_in_four_states_behind_our_server(
    change: Callable[[Tensors, dict[str, str]], None] | None,
    verdict: str,
    alone: str,
    healthy: Path,
    promise: Path,
    quick_python: str,
    tmp_path: Path,
) -> None:
    folder, head = healthy, head_names(healthy)
    if change is not None:
        folder = edited(healthy, tmp_path / "model", change=lambda own: change(own, head))
    with running(folder, "--speculate", "3", "--kernels", "off", python=quick_python) as server:
        own = ("doctor", server.url, str(folder), "--json")
        before = headstart(*own)
        asked = headstart(*own, "--ask", "6", "--score", str(promise))
        since = headstart(*own)  # by what was counted since the start, without a promise
    assert json.loads(before.stdout)["verdict"] == "unknown", "its own first requests do not count"
    found = json.loads(asked.stdout)
    assert (found["verdict"], asked.returncode) == (verdict, int(verdict != "healthy"))
    assert found["engine"] == "headstart" and found["evidence"]["rounds"] >= 60
    assert (json.loads(since.stdout)["verdict"], since.returncode) == (
        alone,
        int(alone != "healthy"),
    )
    causes = "\n".join(found["likely_causes"])
    assert ("nothing but zeros" in causes) == (change is zeroed)
    assert ("--probe" in causes) == (change is not None)


ENGINE = """#!{python} -IS
# Stands for vLLM: its metrics say what a file says.
import http.server, sys, pathlib
if "--version" in sys.argv:
    sys.exit(print("0.23.0"))
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = pathlib.Path("{page}").read_bytes() if self.path == "/metrics" else b"{{}}"
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def log_message(self, *words): pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Page).serve_forever()
"""


def page(accepted: int, rounds: int) -> str:
    name = "vllm:spec_decode_num_"
    return (
        f"{name}drafts_total {rounds}\n{name}draft_tokens_total {rounds}\n"
        f'{name}accepted_tokens_total {accepted}\nvllm:generation_tokens_total {2 * rounds}\n'
        f'{name}accepted_tokens_per_pos_total{{position="0"}} {accepted}\n'
    )  # fmt: skip


@pytest.mark.parametrize(
    ("accepted", "said"), [(3, "warning: dead: 1.0 %"), (200, "note: healthy")]
)
def test_launch_watches_the_first_requests_of_an_engine(
    accepted: int, said: str, tiny: Tiny, tmp_path: Path, quick_python: str
) -> None:
    """The engine is the launched process itself; what watches it says its word and goes."""
    counters, program = tmp_path / "page", tmp_path / "vllm"
    counters.write_text("")
    program.write_text(ENGINE.format(python=sys.executable, page=counters))
    program.chmod(0o755)
    port = _free_port()
    words = ["launch", str(tiny("deepseek_v3")), "--engine", "vllm", "--port", str(port), "--run"]
    errors = (tmp_path / "errors").open("w+")
    engine = subprocess.Popen(
        [quick_python, "-m", "headstart", *words], stdout=subprocess.DEVNULL, stderr=errors,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        counters.write_text(page(accepted, 300))
        until = time.monotonic() + _SECONDS
        while said not in (told := (tmp_path / "errors").read_text()):
            assert time.monotonic() < until and engine.poll() is None, told
            time.sleep(0.05)
        causes = [line for line in told.splitlines() if "likely cause: " in line]
        assert any("recycled_hidden" in line for line in causes) == (accepted == 3)
        assert "headstart doctor: " in told
    finally:
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(10) == -signal.SIGTERM, "the engine's own end, not one of ours"
        errors.close()


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
