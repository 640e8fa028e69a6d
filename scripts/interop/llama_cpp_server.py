"""llama.cpp's server on GGUF files: greedy tokens, and its draft counters.

`llama-server` may be built by itself beside libraries that are there already: compiling only
tools/server of the release that they belong to (v0.5.0) and linking it with them takes minutes.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import vllm_counters as workload
from vllm_engine import Served

_PORT = 8431


def get(path: str, body: dict[str, Any] | None = None) -> str:
    data = json.dumps(body).encode() if body is not None else None
    request = Request(f"http://127.0.0.1:{_PORT}{path}", data, {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


@contextmanager
def server(program: Path, words: list[Any], log: Path) -> Iterator[None]:
    """A server with one slot, one thread and FP32 caches; RuntimeError if it does not start."""
    usual = [
        "--port", _PORT, "-c", 2048, "-np", 1, "-t", 1, "--no-warmup", "--metrics", "-ctk", "f32",
        "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32",
    ]  # fmt: skip
    with log.open("w") as file:
        command = [str(word) for word in (program, *words, *usual)]
        process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            _wait(process, log)
            yield
        finally:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        if process.poll() is not None:
            break
        try:
            get("/health")
            return
        except (URLError, ConnectionError):
            time.sleep(0.1)
    errors = [line for line in log.read_text(errors="replace").splitlines() if " E " in line]
    raise RuntimeError(f"llama-server did not start: {(errors or ['it said nothing'])[0]}")


def served(
    program: Path, model: Path, depth: int, vocab: int, log: Path, draft: Path | None = None
) -> Served:
    """Tokens and counters of the usual prompts; `draft`: a file with the head alone."""
    words: list[Any] = ["-m", model]
    if depth:
        words += ["--spec-type", "draft-mtp", "--spec-draft-n-max", depth, "--spec-draft-p-min", 0]
        words += ["--spec-draft-model", draft] if draft is not None else []
    with server(program, words, log):
        fields = {"n_predict": workload.NUM_TOKENS, "temperature": 0, "return_tokens": True}
        asked = [
            {"prompt": ids, "cache_prompt": False, **fields} for ids in workload.prompts(vocab)
        ]
        tokens = [json.loads(get("/completion", body))["tokens"] for body in asked]
        metrics = get("/metrics")
    rounds = re.findall(r"^\S+num_drafts_total (\d+)", metrics, flags=re.M)
    accepted = re.findall(r"^\S+tokens_per_pos_total\{\S+ (\d+)", metrics, flags=re.M)
    return Served(tokens, int(rounds[0]) if rounds else 0, tuple(map(int, accepted)))
