"""`headstart push` to a vLLM: what it is asked, what it is given, and what is refused by name.

A small HTTP server stands in for vLLM's, with workers whose methods are our extension's.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from headstart.calibrate.tiny import write_tiny
from headstart.errors import ConfigError, ServerError
from headstart.heads.export import plan_export
from headstart.heads.formats import head_in, open_head, open_model
from headstart.push.address import Address
from headstart.push.servers import push

STOCK: dict[str, Any] = {"architecture": "MiMoMTPModel", "own": None, "head_version": 0}
GRAFTED = {"architecture": "MiMoMTPModel", "own": {"family": "qwen3"}, "head_version": 0}


class Running:
    """What a vLLM is, and what its workers were told."""

    def __init__(
        self, version: str, draft: dict[str, Any], refusal: str = "", is_open: bool = True
    ):
        self.version, self.draft, self.refusal, self.is_open = version, draft, refusal, is_open
        self.called: list[str] = []
        self.names: list[str] = []
        self.folder, self.mode = Path(), 0
        self.url = ""

    def results(self, method: str, args: list[str]) -> list[dict[str, Any]]:
        self.called.append(method)
        if method == "headstart_describe":
            return [self.draft, self.draft]
        if method == "headstart_is_prepared":
            return [{"is": True}, {"is": self.called.count(method) > 1}]
        if method == "headstart_swap":
            self.folder = Path(args[0])
            self.mode = self.folder.parent.stat().st_mode & 0o777
            for file in Path(args[0]).glob("*.safetensors"):
                with safe_open(file, framework="pt") as opened:
                    self.names += opened.keys()
            return [{"error": self.refusal}] if self.refusal else [{"head_version": 1}] * 2
        return [{}, {}]


@contextmanager
def serving(running: Running) -> Iterator[Running]:
    class Handler(BaseHTTPRequestHandler):
        def _say(self, status: int, document: Any) -> None:
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            said = {"version": running.version} if self.path == "/version" else {}
            self._say(200, said)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not running.is_open:
                self._say(404, {"detail": "Not Found"})
            else:
                self._say(200, {"results": running.results(body["method"], body["args"])})

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    running.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield running
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("mimo", tmp_path_factory.mktemp("push") / "model")


def test_a_head_goes_under_the_names_of_its_model(model: Path) -> None:
    with serving(Running("0.32.0", STOCK)) as running:
        pushed = push(Address(running.url), open_head(model), None)
    assert (pushed.server, pushed.head_version) == ("vllm", 1)
    assert pushed.digest.startswith("sha256:")
    asked = ["describe", "prepare", "is_prepared", "is_prepared", "swap"]
    assert running.called == [f"headstart_{name}" for name in asked]
    assert running.names and all(n.startswith("model.mtp_layers.0.") for n in running.names)


def test_a_grafted_head_goes_as_it_was_exported(tmp_path: Path) -> None:
    head = open_head(write_tiny("qwen3", tmp_path / "model"))
    exported = plan_export(head, "vllm")
    exported.write(tmp_path / "head")
    expected = {name for shard in exported.plan.shards.values() for name in shard.tensors}
    with serving(Running("0.30.0", GRAFTED)) as running:
        push(Address(running.url), open_head(tmp_path / "head"), None)
    assert set(running.names) == expected


def test_another_familys_head_is_refused(model: Path) -> None:
    with serving(Running("0.32.0", GRAFTED)) as running:
        with pytest.raises(ConfigError, match="a mimo head, and vLLM drafts with a qwen3 head"):
            push(Address(running.url), head_in(open_model(model)), None)
        assert running.called == ["headstart_describe"]


@pytest.mark.parametrize(
    ("family", "draft", "said"),
    [
        (
            "mimo",
            {**STOCK, "architecture": "Qwen3NextMTP"},
            "Qwen3NextMTP, for heads of qwen3_next",
        ),
        ("qwen3", STOCK, "a qwen3 head, and vLLM drafts with MiMoMTPModel, for heads of mimo\\."),
        ("mimo", {**STOCK, "architecture": "NewMTP"}, "drafts with NewMTP, which is not known"),
        ("mimo", {**STOCK, "quantization": "fp8"}, "runs its head quantised \\(fp8\\)"),
    ],
    ids=["another family", "a head that is served apart", "an unknown class", "a quantised draft"],
)
def test_a_head_that_would_not_be_loaded_is_refused(
    tmp_path: Path, family: str, draft: dict[str, Any], said: str
) -> None:
    head = open_head(write_tiny(family, tmp_path / "model"))
    with serving(Running("0.32.0", draft)) as running:
        with pytest.raises(ConfigError, match=said):
            push(Address(running.url), head, None)
        assert running.called == ["headstart_describe"]


@pytest.mark.parametrize(
    ("running", "said"),
    [
        (Running("0.25.1", GRAFTED), "too old"),
        (Running("0.33.0", GRAFTED), "too new"),
        (Running("0.32.0", GRAFTED, is_open=False), "VLLM_SERVER_DEV_MODE=1"),
        (Running("0.32.0", {}), "no draft that could take a head"),
        (Running("0.32.0", {**GRAFTED, "own": None}, refusal="not finite"), "not finite"),
    ],
)
def test_what_cannot_take_it_says_why(model: Path, running: Running, said: str) -> None:
    with serving(running), pytest.raises(ServerError, match=said):
        push(Address(running.url), open_head(model), None)


def test_vllm_elsewhere_needs_a_folder_that_both_machines_have(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Running("0.32.0", STOCK)) as running:
        monkeypatch.setattr("headstart.push.vllm._LOCAL", ())
        with pytest.raises(ConfigError, match="give one by --folder"):
            push(Address(running.url), open_head(model), None)
        folder = str(model.parent)
        assert push(Address(running.url, folder=folder), open_head(model), None).head_version == 1
    assert [path.name for path in model.parent.iterdir()] == ["model"]


def test_workers_can_read_the_folder_wherever_and_whoever_they_are(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    with serving(Running("0.32.0", STOCK)) as running:
        push(Address(running.url, folder="."), open_head(model), None)
    assert running.folder.is_absolute()
    assert running.mode == 0o755
