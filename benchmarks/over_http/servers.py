"""The servers: started with what each needs to be at its best, asked for health and counters.

A server may also be one that runs already, given by its port. Both keep their own defaults where
nothing else is said here; prefix caching is on in both.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from over_http.load import MODEL
from over_http.summary import counters

_ROOT = Path(__file__).parents[2]
_LOG_TAIL = 3000
_VLLM_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
# As our server has it: where JSON may hold any blanks, a trunk of no sense writes little else.
_GRAMMARS = {"backend": "xgrammar", "disable_any_whitespace": True}


class Failed(Exception):
    """A server did not start, or has ended."""


@dataclass(frozen=True)
class Settings:
    """How servers are started."""

    model: Path
    drafts: int
    max_requests: int
    max_len: int
    is_together: bool  # both in memory at once
    kv_gib: float  # of ours, where both are
    memory: float  # of the GPU, for vLLM
    flags: dict[str, list[str]] = field(default_factory=dict)  # more of each
    vllm_python: str | None = None
    patience: float = 400.0


def command(engine: str, port: int, settings: Settings) -> list[str]:
    """The command line of a server."""
    own = settings.flags.get(engine, [])
    if engine == "ours":
        kv = ["--kv-bytes", str(int(settings.kv_gib * 2**30))] if settings.is_together else []
        return [
            sys.executable, "-P", "-m", "headstart", "serve", str(settings.model),
            "--port", str(port), "--speculate", str(settings.drafts),
            "--max-running-requests", str(settings.max_requests),
            "--max-model-len", str(settings.max_len), "--max-queue", "4096", *kv, *own,
        ]  # fmt: skip
    drafts = {"method": "mtp", "num_speculative_tokens": settings.drafts}
    speculative = ["--speculative-config", json.dumps(drafts)] if settings.drafts else []
    return [
        settings.vllm_python or sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(settings.model), "--port", str(port), "--served-model-name", MODEL,
        "--trust-remote-code", "--max-model-len", str(settings.max_len),
        "--max-num-seqs", str(settings.max_requests),
        "--gpu-memory-utilization", str(settings.memory), *speculative,
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--structured-outputs-config", json.dumps(_GRAMMARS), "--disable-uvicorn-access-log", *own,
    ]  # fmt: skip


class Server:
    """One server under a name; `engine` says which it is."""

    def __init__(self, name: str, port: int, process: subprocess.Popen[bytes] | None, log: Path):
        self.name, self.port, self._process, self._log = name, port, process, log
        self.start_seconds: float | None = None
        self.command = ""
        self._began, self._patience = time.perf_counter(), 0.0

    @classmethod
    def start(cls, name: str, settings: Settings, folder: Path) -> Server:
        """Begin to start; `wait_ready` says when it answers."""
        engine, port, log = name.partition("-")[0], _free_port(), folder / f"{name}.log"
        words = command(engine, port, settings)
        environment = {**(_VLLM_ENVIRONMENT if engine == "vllm" else {}), **os.environ}
        if engine == "ours":  # a checkout need not be installed
            path = [str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(path)
        with log.open("wb") as said:
            process = subprocess.Popen(
                words, stdout=said, stderr=subprocess.STDOUT, env=environment, cwd=folder,
                start_new_session=True,
            )  # fmt: skip
        server = cls(name, port, process, log)
        server.command = shlex.join(words)
        server._patience = settings.patience
        return server

    def wait_ready(self) -> None:
        """Until /health says 200; Failed with the end of its log where it does not."""
        while True:
            if self._process is not None and self._process.poll() is not None:
                raise Failed(f"{self.name} ended with {self._process.returncode}:\n{self._tail()}")
            if self._is_healthy():
                self.start_seconds = time.perf_counter() - self._began
                return
            if self._process is None or time.perf_counter() - self._began > self._patience:
                raise Failed(f"{self.name} does not answer /health with 200:\n{self._tail()}")
            time.sleep(0.02)

    @property
    def is_running(self) -> bool:
        return self._process is None or self._process.poll() is None

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as said:
                return bool(said.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def counters(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as page:
            return counters(page.read().decode())

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-_LOG_TAIL:] if self._log.is_file() else ""

    def stop(self) -> None:
        """End the process and what it started, and wait until its memory is free."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
