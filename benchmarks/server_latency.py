"""How quickly a busy server answers: /health while a long prompt is read.

python benchmarks/server_latency.py [--prompt-tokens 30000] [--hidden 512] [--layers 8] [--hogs 0]
                                    [--text]

A server process reads a prompt of many tokens (as text with --text) while /health is asked every
10 ms. Part of what the slowest took is not the server's: `waited_ms` is the time in which the event
loop's thread, or the one that asks, could have run and another process had its core;
`other_threads_waited_ms` the same of the server's other thread that waited most, for which the loop
waits if it has the interpreter lock. A process that only sleeps for 10 ms at a time says how late
the machine itself is (`machine_late_ms`). `--hogs` adds processes that only take cores. The last
line of output is one JSON document.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from server_process import ServerProcess, serving, waited_by

from headstart.calibrate.tiny import write_tiny

_VOCAB = 2048
_SLEEPER = """
import time
while True:
    before = time.perf_counter()
    time.sleep(0.01)
    print(time.perf_counter() - before - 0.01, flush=True)
"""


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


@dataclass(frozen=True, order=True)
class Asked:
    """One answer of /health; milliseconds."""

    ms: float
    waited_ms: float
    other_threads_waited_ms: float


def ask_health(server: ServerProcess, until: threading.Event) -> list[Asked]:
    own, loop = Path("/proc/thread-self"), str(server.process.pid)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    taken = []
    while not until.is_set():
        before, mine, started = server.waited_seconds, waited_by(own) or 0.0, time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        seconds = time.perf_counter() - started
        waits = {name: at - before.get(name, 0.0) for name, at in server.waited_seconds.items()}
        waited = waits.pop(loop) + (waited_by(own) or 0.0) - mine
        taken.append(Asked(1e3 * seconds, 1e3 * waited, 1e3 * max(waits.values())))
        time.sleep(0.01)
    return taken


def while_reading(server: ServerProcess, num_tokens: int, *, is_text: bool) -> dict[str, Any]:
    draw = random.Random(0)
    ids = [draw.randrange(2, _VOCAB) for _ in range(num_tokens)]
    prompt = " ".join(f"t{token}" for token in ids) if is_text else ids
    is_read = threading.Event()

    def read() -> None:
        post(server.port, {"prompt": prompt, "max_tokens": 1})
        is_read.set()

    with tempfile.TemporaryFile("w+") as said:
        sleeper = subprocess.Popen([sys.executable, "-c", _SLEEPER], stdout=said)
        started = time.perf_counter()
        reader = threading.Thread(target=read)
        reader.start()
        answers = sorted(ask_health(server, is_read))
        reader.join()
        prompt_seconds = time.perf_counter() - started
        sleeper.kill()
        sleeper.wait()
        said.seek(0)
        late = sorted(float(line) for line in said.read().splitlines()[:-1])
    taken = [answer.ms for answer in answers]
    return {
        "prompt_tokens": num_tokens,
        "prompt_seconds": round(prompt_seconds, 2),
        "health_requests": len(taken),
        "health_median_ms": round(statistics.median(taken), 2),
        "health_p99_ms": round(taken[int(0.99 * (len(taken) - 1))], 2),
        "health_max_ms": round(taken[-1], 2),
        "health_max_less_waiting_ms": round(max(a.ms - a.waited_ms for a in answers), 2),
        "machine_late_ms": [round(1e3 * seconds, 1) for seconds in late[:-6:-1]],
        "slowest": [
            {name: round(value, 1) for name, value in asdict(answer).items()}
            for answer in answers[:-6:-1]
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=30000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hogs", type=int, default=0)
    parser.add_argument("--text", action="store_true")
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
                result = while_reading(server, given.prompt_tokens, is_text=given.text)
    finally:
        for hog in hogs:
            hog.kill()
    print(json.dumps({"load": round(load, 1), **result}))


if __name__ == "__main__":
    main()
