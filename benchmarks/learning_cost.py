"""What learning costs while requests run, on a CPU: throughput and time per token with and without.

    python benchmarks/learning_cost.py --texts texts --work work --out results/learning_cost

Two servers of the demo's model, one of them with `--learn` and enough texts to learn from all the
time. They answer the same requests in turns, one server stopped while the other is measured, so
that both see the machine in the same state. What is measured is kept, with the trunk's states, as
usual requests are; every round has other requests, so that a round is not learned from before it is
measured. Time per token is a request's time after its first token over the tokens that
came after it, streamed, as `headstart bench` counts it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from learning_kinds import USUAL, Asked, requests
from learning_server import cpu_name

from headstart.demo.unpacked import ready
from headstart.processes import python_command

_HTTP = httpx.Client(timeout=600)
_MAX_TOKENS = 96


class Server:
    """One server, in a process group of its own so that it can be stopped with its learner."""

    def __init__(self, model: Path, flags: list[str], log: Path):
        command = python_command(
            "headstart", "serve", str(model), "--port", "0", "--speculate", "3", "--weights",
            "int8", "--max-model-len", "2048", "--no-prefix-caching", *flags,
        )  # fmt: skip
        self._log = log.open("w", encoding="utf-8")
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.url = ""
        for line in self.process.stderr:
            self._log.write(line)
            if "ready at " in line:
                self.url = line.split("ready at ")[1].split(",")[0].strip()
                break
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._log.write(line)
            self._log.flush()

    def ask(self, asked: Asked) -> tuple[int, float]:
        """Tokens after the first chunk, and the seconds that they took."""
        body = {
            "model": "default", "messages": [{"role": "user", "content": asked.text}],
            "temperature": 0, "max_tokens": _MAX_TOKENS, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        first = last = 0.0
        tokens = 0
        with _HTTP.stream("POST", f"{self.url}/v1/chat/completions", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line.endswith("[DONE]"):
                    continue
                chunk = json.loads(line[6:])
                if chunk.get("usage"):
                    tokens = chunk["usage"]["completion_tokens"]
                if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                    last = time.perf_counter()
                    first = first or last
        return tokens - 1, last - first

    def load(self, asked: list[Asked], streams: int) -> dict[str, Any]:
        started = time.perf_counter()
        with ThreadPoolExecutor(streams) as pool:
            found = list(pool.map(self.ask, asked))
        seconds = time.perf_counter() - started
        per_token = sorted(spent / tokens for tokens, spent in found if tokens > 0)
        return {
            "tokens_per_second": sum(tokens + 1 for tokens, _ in found) / seconds,
            "per_token_ms": [1e3 * value for value in per_token],
        }

    def signal_all(self, number: int) -> None:
        """To the server and every process below it."""
        for pid in [self.process.pid, *_children(self.process.pid)]:
            os.kill(pid, number)

    def stop(self) -> None:
        self.signal_all(signal.SIGCONT)
        self.process.terminate()
        self.process.wait(60)


def _children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            child = int(path.parent.name)
            found += [child, *_children(child)]
    return found


def in_rounds(asked: Sequence[Asked], rounds: int) -> list[list[Asked]]:
    """As many requests for each round, of mixed kinds as they come; none is in two rounds."""
    number = len(asked) // rounds
    return [list(asked[at * number : (at + 1) * number]) for at in range(rounds)]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    texts, asked = requests(
        arguments.texts, USUAL, served=arguments.served,
        measured=arguments.asked * arguments.rounds,
    )  # fmt: skip
    rounds = in_rounds(asked, arguments.rounds)
    folder = work / f"learn-{int(time.time())}"
    if arguments.filled is not None:
        shutil.copytree(arguments.filled, folder)
    learn = ["--learn", str(folder), "--learn-share", str(arguments.share)]
    servers = {"without": Server(ready(), [], work / "without.log")}
    servers["without"].signal_all(signal.SIGSTOP)
    servers["learning"] = Server(ready(), learn, work / "learning.log")
    result: dict[str, Any] = {name: [] for name in servers}
    try:
        if arguments.filled is None:
            servers["learning"].load(texts, 8)
        status = folder / "status.json"
        while not status.is_file() or json.loads(status.read_text())["steps"] < 3:
            time.sleep(2)  # it learns: from now on it would always run if it were let
        servers["learning"].signal_all(signal.SIGSTOP)
        for part in rounds:
            for name, server in servers.items():
                server.signal_all(signal.SIGCONT)
                result[name].append(server.load(part, arguments.streams))
                server.signal_all(signal.SIGSTOP)
                print(name, f"{result[name][-1]['tokens_per_second']:.1f} tokens/s", flush=True)
    finally:
        for server in servers.values():
            server.stop()
    found = json.loads(status.read_text())
    return {
        **result, "share": arguments.share, "streams": arguments.streams, "cpu": cpu_name(),
        "cores": os.cpu_count(), "let_run": found["share"], "steps": found["steps"],
        "checks": found["checks"], "swaps": found["swaps"], "collected": found["collected"],
        "rounds": arguments.rounds, "requests": len(rounds[0]),
    }  # fmt: skip


def summary(parts: list[dict[str, Any]]) -> dict[str, float]:
    every = sorted(value for part in parts for value in part["per_token_ms"])
    return {
        "tokens_per_second": statistics.median(part["tokens_per_second"] for part in parts),
        "median_ms": statistics.median(every), "p99_ms": every[int(0.99 * (len(every) - 1))],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("texts", "work", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--filled", type=Path, help="a folder of --learn with enough texts already")
    parser.add_argument("--served", type=int, default=24, help="texts of each kind to learn from")
    parser.add_argument("--asked", type=int, default=8, help="requests of each kind in a round")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.1)
    arguments = parser.parse_args()
    result = measure(arguments)
    sums = {name: summary(result[name]) for name in ("without", "learning")}
    result["summary"] = sums
    out: Path = arguments.out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    names = ("served", "asked", "streams", "rounds", "share")
    numbers = " ".join(f"--{name} {getattr(arguments, name):g}" for name in names)
    lines = [
        "# What learning costs while requests run, on a CPU", "",
        f"{result['cpu']}, {result['cores']} cores; the demo's model in int8, K = 3, "
        f"{result['streams']} streams, `--learn-share {result['share']:g}`; both servers in turns. "
        f"The learner was let run {result['let_run']:.1%} of the time ({result['steps']} steps, "
        f"{result['checks']} checks, {result['swaps']} swaps).",
        f"{result['rounds']} rounds of {result['requests']} requests each, other ones in every "
        "round; "
        f"{result['collected']['texts']} answers were kept, {result['collected']['with_states']} "
        "of them with the trunk's states.", "",
        "| | tokens/s | time per token, median | p99 |", "|---|---|---|---|",
        *(f"| {name} | {found['tokens_per_second']:.1f} | {found['median_ms']:.1f} ms | "
          f"{found['p99_ms']:.1f} ms |" for name, found in sums.items()),
        "| change | " + " | ".join(
            f"{sums['learning'][k] / sums['without'][k] - 1:+.1%}"
            for k in ("tokens_per_second", "median_ms", "p99_ms")) + " |", "",
        f"`python benchmarks/learning_cost.py --texts texts --work work --out out {numbers}`", "",
    ]  # fmt: skip
    out.with_suffix(".md").write_text("\n".join(lines))
    print(json.dumps(sums))


if __name__ == "__main__":
    main()
