"""A server that learns, for a long time: requests, aborts and swaps; every text, and the memory.

    python benchmarks/learning_soak.py MODEL --minutes 30

MODEL is a calibrated checkpoint. The server starts with its head made weak by noise, and learns.
Clients ask for a while and rest for a while, together; some hang up. Every few seconds the head is
swapped besides, in turns to the checkpoint's own and the one that learning has made, while requests
run. Every greedy text must be the cycle that the trunk walks, and every seeded one the same as at
its first time. Prints a line every minute: answers, swaps, collected texts, and the resident memory
of server (clients included) and learner; at the end how much these took after the store was full.

The learner has the priority of other programs here: with its own, the lowest, it would get no time
where the cores are never idle. How long it runs is decided by --share and the pauses alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from head_swap import disturbed

from headstart.calibrate.calibrated import agreement_of
from headstart.engine.engine import Engine
from headstart.heads.export import plan_export
from headstart.heads.formats import open_head
from headstart.learn.options import LearnOptions
from headstart.learn.starting import open_folder
from headstart.learn.state_files import used_bytes
from headstart.learn.supervisor import Learning
from headstart.server.lifecycle import Serving
from headstart.server.options import ServerOptions, listen
from headstart.server.worker import Worker

_CLIENTS, _PROMPTS, _TOKENS = 4, 400, 32
_LINE_SECONDS = 60


class Clients:
    """Threads that ask until they are told to end; what is wrong is kept."""

    def __init__(self, url: str, following: list[int], given: argparse.Namespace):
        self.url, self._following, self._given = url, following, given
        self._seeded: dict[int, list[int]] = {}
        self._http = httpx.Client(timeout=given.patience)
        self.num_answers = self.num_aborted = 0
        self.wrong: list[str] = []
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _run(self, client: int) -> None:
        draw, given = random.Random(client), self._given
        while not self._end.is_set():
            if time.monotonic() % (given.asking + given.resting) > given.asking:
                self._end.wait(0.1)
                continue
            try:
                self._ask(draw)
            except (httpx.HTTPError, AssertionError) as error:
                self.wrong.append(repr(error)[:200])
                print(time.strftime("%H:%M:%S"), "wrong:", self.wrong[-1], flush=True)

    def _ask(self, draw: random.Random) -> None:
        number = draw.randrange(_PROMPTS)
        prompt = random.Random(number).choices(range(2, self._given.active), k=24)
        body: dict[str, Any] = {
            "model": "default", "prompt": prompt, "max_tokens": _TOKENS, "ignore_eos": True,
            "temperature": 0, "return_token_ids": True,
        }  # fmt: skip
        kind = draw.random()
        if kind < 0.05:
            self._hang_up({**body, "stream": True})
            return
        if kind < 0.4:
            body |= {"temperature": 1.0, "seed": number}
        found = self._http.post(f"{self.url}/v1/completions", json=body)
        assert found.status_code == 200, found.text
        tokens = found.json()["choices"][0]["token_ids"]
        if body["temperature"]:
            assert self._seeded.setdefault(number, tokens) == tokens, (
                f"seeded text {number} differs"
            )
        else:
            for before, after in zip([prompt[-1], *tokens], tokens, strict=False):
                assert self._following[before] == after, f"greedy text {number} is another"
        self.num_answers += 1

    def _hang_up(self, body: dict[str, Any]) -> None:
        with self._http.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        self.num_aborted += 1


def resident(pid: int) -> float:
    """Megabytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def swap(worker: Worker, head: Path) -> None:
    """As learning does it: prepared beside the running one, and copied between two steps."""
    assert worker.engine is not None
    prepared = worker.engine.prepare_head(head)
    worker.between_steps(lambda engine: engine.swap_head(prepared)).result(60)


def soak(model: Path, folder: Path, given: argparse.Namespace) -> list[str]:
    good = folder / "good"
    plan_export(open_head(model), "headstart").write(good)
    weak = disturbed(good, folder / "weak", given.noise)
    options = LearnOptions(
        learn=folder / "learn", learn_share=given.share, learn_gigabytes=given.gigabytes
    )
    task = open_folder(options, str(model), weak, device="cpu", dtype="auto")
    task = replace(
        task, overrides={"batch_tokens": 256, "learning_rate": 3e-3}, least_seconds=5.0,
        warm_up=10, gives_way=False,
    )  # fmt: skip
    learning = Learning(options, lambda path: replace(task, head=str(path)))
    learning.start()

    def make() -> Engine:
        learning.wait_for_memory()
        return Engine(
            model, learning.serving_path, speculate=3, threads=1, max_running_requests=4,
            max_model_len=128, kv_bytes=given.kv_bytes,
        )  # fmt: skip

    own = ServerOptions(port=0)
    serving = Serving("soak", own, make, listen(own), learning=learning)
    thread = threading.Thread(target=serving.run)
    thread.start()
    while not serving.state.worker.is_ready:
        time.sleep(0.2)
    agreement = agreement_of(model)
    clients = Clients(serving.url, agreement.following.tolist(), given)
    forced, began, lines = 0, time.monotonic(), list[dict[str, Any]]()
    try:
        while time.monotonic() - began < 60 * given.minutes:
            minute = time.monotonic()
            while time.monotonic() - minute < _LINE_SECONDS:
                time.sleep(given.every)
                swap(serving.state.worker, learning.serving_path if forced % 2 else good)
                forced += 1
            lines.append({
                "minutes": round((time.monotonic() - began) / 60, 1),
                "answers": clients.num_answers, "aborted": clients.num_aborted,
                "wrong": len(clients.wrong), "forced_swaps": forced, **facts_of(learning),
            })  # fmt: skip
            print(json.dumps(lines[-1]), flush=True)
    finally:
        clients.close()
        serving.signal(signal.SIGTERM)
        thread.join(60)
    print(memory_since_full(lines))
    return clients.wrong


def facts_of(learning: Learning) -> dict[str, Any]:
    numbers, child = learning.numbers, learning._child
    names = ("steps", "checks", "rollbacks", "failures", "state")
    return {
        "learned_swaps": numbers["swaps"], **{name: numbers[name] for name in names},
        "learner_share": round(learning.facts()["share"], 3),
        "texts": learning.collector.counts.texts, "lost": learning.collector.counts.lost,
        "dropped": numbers["thinned"], "disk_mb": round(used_bytes(learning.folder) / 1e6, 2),
        "server_mb": round(resident(os.getpid())),
        "learner_mb": round(resident(child.pid)) if child and child.is_running else None,
    }  # fmt: skip


def memory_since_full(lines: list[dict[str, Any]]) -> str:
    """The most of both in the last third of the time since texts were first dropped, over the most
    in the first third."""
    full = next((i for i, own in enumerate(lines) if own["dropped"]), None)
    since = [] if full is None else lines[full:]
    third = len(since) // 3
    if not third:
        return "the store was not full for long enough to say how memory grows then"
    parts = []
    for name in ("server_mb", "learner_mb"):
        first, last = (
            max(own[name] or 0 for own in part) for part in (since[:third], since[-third:])
        )
        parts.append(f"{name} {first} -> {last}")
    return f"store full from minute {since[0]['minutes']} on: {', '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between forced swaps")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds a client waits")
    parser.add_argument("--active", type=int, default=240, help="prompts are drawn from so many")
    parser.add_argument("--noise", type=float, default=1.0, help="in the weak head, by tensor")
    parser.add_argument("--asking", type=float, default=20.0, help="seconds of requests, then")
    parser.add_argument("--resting", type=float, default=10.0, help="seconds without any")
    parser.add_argument("--share", type=float, default=0.5, help="as --learn-share")
    parser.add_argument("--gigabytes", type=float, default=0.0005, help="as --learn-gigabytes")
    parser.add_argument("--kv-bytes", type=int, default=None, help="little: with preemptions")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wrong = soak(given.model, Path(folder), given)
    print("wrong:", wrong[:5] if wrong else "nothing")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
