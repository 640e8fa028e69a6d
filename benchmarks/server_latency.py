"""How quickly a busy server answers: /health while a long prompt is read.

python benchmarks/server_latency.py [--prompt-tokens 30000] [--hidden 512] [--layers 8] [--hogs 0]

A server process reads a prompt of many tokens while /health is asked every 10 ms. Part of what the
slowest took is not the server's: `waited_for_a_processor_ms` is the time in which the event loop's
thread could have run and another process had its core. `--hogs` adds processes that do nothing but
take cores. The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from server_process import ServerProcess, serving

from headstart.calibrate.tiny import write_tiny

_VOCAB = 2048


def make_model(folder: Path, *, hidden: int, layers: int, positions: int) -> Path:
    return write_tiny(
        "mimo", folder / "model", dtype="F32", hidden_size=hidden, num_hidden_layers=layers,
        intermediate_size=2 * hidden, vocab_size=_VOCAB, max_position_embeddings=positions,
    )  # fmt: skip


def post(port: int, fields: dict[str, Any]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=900)
    connection.request("POST", "/v1/completions", json.dumps(fields))
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 200, body


def ask_health(server: ServerProcess, until: threading.Event) -> list[tuple[float, float]]:
    """Milliseconds of each answer, and of those the loop's wait for a processor."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    taken = []
    while not until.is_set():
        waited, started = server.loop_seconds[1], time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        seconds = time.perf_counter() - started
        taken.append((1e3 * seconds, 1e3 * (server.loop_seconds[1] - waited)))
        time.sleep(0.01)
    return taken


def while_reading(server: ServerProcess, num_tokens: int) -> dict[str, Any]:
    draw = random.Random(0)
    prompt = [draw.randrange(2, _VOCAB) for _ in range(num_tokens)]
    is_read = threading.Event()

    def read() -> None:
        post(server.port, {"prompt": prompt, "max_tokens": 1})
        is_read.set()

    started = time.perf_counter()
    reader = threading.Thread(target=read)
    reader.start()
    pairs = sorted(ask_health(server, is_read))
    reader.join()
    taken = [total for total, _ in pairs]
    return {
        "prompt_tokens": num_tokens,
        "prompt_seconds": round(time.perf_counter() - started, 2),
        "health_requests": len(taken),
        "health_median_ms": round(statistics.median(taken), 2),
        "health_p99_ms": round(taken[int(0.99 * (len(taken) - 1))], 2),
        "health_max_ms": round(taken[-1], 2),
        "slowest": [
            {"ms": round(total, 1), "waited_for_a_processor_ms": round(waited, 1)}
            for total, waited in pairs[:-6:-1]
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=30000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hogs", type=int, default=0)
    given = parser.parse_args()
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(given.hogs)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(
                Path(folder), hidden=given.hidden, layers=given.layers,
                positions=given.prompt_tokens + 16,
            )  # fmt: skip
            with serving(model) as server:
                post(server.port, {"prompt": [2, 3], "max_tokens": 2})
                load = os.getloadavg()[0]
                result = {"load": round(load, 1), **while_reading(server, given.prompt_tokens)}
    finally:
        for hog in hogs:
            hog.kill()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
