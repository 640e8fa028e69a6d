"""The real vLLM's server on the CPU, for as long as a context lasts; its log goes to a file."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from checkpoints import CommandFailed

OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
_START_SECONDS = 300
_STOP_SECONDS = 30


@contextmanager
def vllm_server(
    python: Path,
    model: Path,
    depth: int,
    work: Path,
    *,
    words: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """The address of one that drafts `depth` tokens with the model's own head, in float32; `words`
    are further ones of its command."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    speculation = {"method": "mtp", "num_speculative_tokens": depth}
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", "tiny", "--trust-remote-code", "--host", "127.0.0.1", "--port",
        str(port), "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8",
        "--max-num-batched-tokens", "512", "--enforce-eager", "--no-enable-prefix-caching",
        "--speculative-config", json.dumps(speculation),
        *words,
    ]  # fmt: skip
    with (work / "vllm.log").open("w") as log:
        # Not in the repository: vLLM must not import what lies there.
        server = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=work,
            env={**os.environ, **OFFLINE, **(variables or {})},
        )  # fmt: skip
        try:
            _wait_until_up(server, url)
            yield url
        finally:
            _stop(server)


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _wait_until_up(server: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        if server.poll() is not None:
            raise CommandFailed(f"vLLM ended with {server.returncode}; see vllm.log")
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(1)
        else:
            return
    raise CommandFailed(f"vLLM was not up within {_START_SECONDS} s; see vllm.log")
