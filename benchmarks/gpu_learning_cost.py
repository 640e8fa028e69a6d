"""What learning costs while requests run, on a GPU: the same server before and while it learns.

PYTHONPATH=. python3 benchmarks/gpu_learning_cost.py MODEL [--streams 1 16 80] [--share 0.1]

MODEL is a calibrated checkpoint. A server with `--learn` first has nothing to learn from, so that
its learner sleeps; then it keeps some answers, and from its third step on the same load is measured
again. Prompts are token ids drawn at random, answers have a fixed length and are streamed to up to
eight client processes: one alone would be slower than the server. A load has several requests of
each stream, so that it lasts for many of the periods in which learning gets its share. Of each
load: tokens per second, and the time between two chunks of a stream (median, 99th percentile,
longest), over the tokens that came with the later one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from headstart.learn.certainty import FEWEST
from headstart.learn.loop import FEWEST_TEXTS
from headstart.learn.texts import Text
from headstart.processes import python_command

_FEWEST_STEPS = 3  # from here on the learner would always run if it were let
_CLIENTS = 8  # processes
_STATUS_SECONDS = 6.0  # in which the server writes its numbers anew
_HTTP = httpx.Client(timeout=600, limits=httpx.Limits(max_connections=256))


def started(model: str, folder: Path, given: argparse.Namespace) -> tuple[Any, str]:
    """A server and its address."""
    command = python_command(
        "headstart", "serve", model, "--port", "0", "--speculate", "3", "--max-model-len",
        str(given.prompt + given.answer + 64), "--max-running-requests", str(max(given.streams)),
        "--no-prefix-caching", "--learn", str(folder), "--learn-share", str(given.share),
        *given.flags.split(),
    )  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        print(line.rstrip(), flush=True)
        if "ready at " in line:
            threading.Thread(target=_follow, args=(process.stderr,), daemon=True).start()
            return process, line.split("ready at ")[1].split(",")[0].strip()
    raise SystemExit("the server ended before it was ready")


def _follow(lines: Any) -> None:
    for line in lines:
        if "learning:" in line:
            print(line.rstrip(), flush=True)


def ask(url: str, prompt: list[int], tokens: int, *, is_kept: bool) -> tuple[int, list[float]]:
    """Tokens of the answer, and milliseconds per token of every chunk but the first."""
    body = {
        "model": "default", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "return_token_ids": True,
        "headstart": {"learn": is_kept},
    }  # fmt: skip
    last, count, gaps = 0.0, 0, []
    with _HTTP.stream("POST", f"{url}/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line.endswith("[DONE]"):
                continue
            choices = json.loads(line[6:])["choices"]
            new = len(choices[0].get("token_ids") or ()) if choices else 0
            if new:
                now = time.perf_counter()
                if last:
                    gaps.append(1e3 * (now - last) / new)
                last, count = now, count + new
    return count, gaps


def ask_all(
    url: str, prompts: list[list[int]], streams: int, tokens: int, is_kept: bool
) -> list[tuple[int, list[float]]]:
    """In one client, `streams` at once."""
    with ThreadPoolExecutor(streams) as pool:
        return list(pool.map(lambda one: ask(url, one, tokens, is_kept=is_kept), prompts))


def load(
    pool: ProcessPoolExecutor, url: str, prompts: list[list[int]], streams: int, tokens: int, *,
    is_kept: bool = False,
) -> dict[str, Any]:  # fmt: skip
    clients = min(_CLIENTS, streams)
    began = time.perf_counter()
    parts = [
        pool.submit(ask_all, url, prompts[i::clients], -(-(streams - i) // clients), tokens,
                    is_kept)
        for i in range(clients)
    ]  # fmt: skip
    found = [one for part in parts for one in part.result()]
    seconds = time.perf_counter() - began
    gaps = sorted(gap for _, own in found for gap in own)
    return {
        "tokens_per_second": round(sum(count for count, _ in found) / seconds, 1),
        "seconds": round(seconds, 1),
        "per_token_ms": {
            "median": round(gaps[len(gaps) // 2], 3), "p99": round(gaps[int(0.99 * len(gaps))], 3),
            "longest": round(gaps[-1], 3),
        },
    }  # fmt: skip


def enough(prompts: Iterator[list[int]]) -> list[list[int]]:
    """As many as learning starts with, half as many again; a hash holds some of them out."""
    kept: list[list[int]] = []
    counts = {False: 0, True: 0}
    while counts[False] < 1.5 * FEWEST_TEXTS or counts[True] < 1.5 * FEWEST:
        kept.append(next(prompts))
        text = Text(id="", prompt=kept[-1], answer=[], kind="", time=0.0, finish_reason="length")
        counts[text.is_heldout] += 1
    return kept


def measure(pool: ProcessPoolExecutor, url: str, folder: Path, given: argparse.Namespace) -> None:
    draw = random.Random(0)
    prompts = iter(lambda: draw.choices(range(2, given.vocab), k=given.prompt), None)
    asked = {
        streams: list(itertools.islice(prompts, max(8, given.rounds * streams)))
        for streams in given.streams
    }
    for streams, own in asked.items():
        load(pool, url, own[: max(4, streams)], streams, given.answer)  # warms up
    for _ in range(2):
        report("not learning", pool, url, asked, given)
    texts = enough(prompts)
    load(pool, url, texts, max(given.streams), given.answer // 2, is_kept=True)
    status, began = folder / "status.json", time.monotonic()
    while json.loads(status.read_text())["steps"] < _FEWEST_STEPS:
        if time.monotonic() - began > given.wait:
            raise SystemExit(f"no {_FEWEST_STEPS} steps in {given.wait} s: {status.read_text()}")
        time.sleep(0.5)
    waited = round(time.monotonic() - began, 1)
    print(json.dumps({"texts": len(texts), "first_steps_seconds": waited}), flush=True)
    for _ in range(2):
        report("learning", pool, url, asked, given)
    time.sleep(_STATUS_SECONDS)
    found = json.loads(status.read_text())
    kept = ("steps", "seconds", "checks", "swaps", "rollbacks", "failures", "share", "state")
    print(json.dumps({"learner": {key: found[key] for key in kept}}), flush=True)


def report(
    name: str, pool: ProcessPoolExecutor, url: str, asked: dict[int, Any],
    given: argparse.Namespace,
) -> None:  # fmt: skip
    for streams, own in asked.items():
        found = load(pool, url, own, streams, given.answer)
        print(json.dumps({"state": name, "streams": streams, **found}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 80])
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--answer", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=5, help="requests of a stream in a load")
    parser.add_argument("--vocab", type=int, default=40000, help="prompts are drawn from so many")
    parser.add_argument("--wait", type=float, default=90.0, help="seconds for the first steps")
    parser.add_argument("--flags", default="", help="more options of the server")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "learn"
        process, url = started(given.model, folder, given)
        try:
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(_CLIENTS, mp_context=spawn) as pool:
                measure(pool, url, folder, given)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


if __name__ == "__main__":
    main()
