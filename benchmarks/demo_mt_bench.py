"""The demo's model on MT-Bench's first turns: what its head brings on this CPU, and a peer.

    python benchmarks/demo_mt_bench.py mt_bench.jsonl --out result.json
    python benchmarks/demo_mt_bench.py mt_bench.jsonl --llama-server build/bin/llama-server

Greedy, one request at a time, answers of at most 256 tokens. For int8 and fp32 an engine that
drafts by `auto` and one without a head answer each question in turns, step by step, so that both
see the machine in the same state; only time inside an engine counts. A llama.cpp server, if its
program is given, answers the same question with the same GGUF file in between. Speed-ups are means
over questions, with 95 % intervals from drawing questions again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headstart.data.conversations import Conversation, read_conversations
from headstart.demo.engines import Weights, open_engines
from headstart.demo.package import gguf_path
from headstart.demo.race import Race, Side, race
from headstart.demo.shipped import head_digest, shipped_head
from headstart.demo.unpacked import ready
from headstart.engine.engine import Engine

KINDS: dict[str, Weights] = {"int8": "int8", "fp32": "as-dtype"}
DRAWS = 2000


def measure(
    questions: Sequence[Conversation],
    engines: dict[str, dict[Side, Engine]],
    peer: LlamaServer | None,
    max_tokens: int,
) -> Iterator[dict[str, Any]]:
    """One row per question: tokens per second of every engine."""
    for number, question in enumerate(questions, 1):
        text = question.messages[0]["content"]
        row: dict[str, Any] = {"id": question.id, "category": question.category}
        for kind, both in engines.items():
            params = both["plain"].prompts.default_params(temperature=0.0, max_tokens=max_tokens)
            row[kind] = facts(race(both, text, params))
        if peer is not None:
            row["llama.cpp"] = peer.answer(text, max_tokens)
        said = ", ".join(f"{kind} {row[kind]['speed_up']:.2f}x" for kind in engines)
        print(f"{number}/{len(questions)} {question.category}: {said}", flush=True)
        yield row


def facts(found: Race) -> dict[str, Any]:
    document = found.as_json()
    document.pop("texts"), document.pop("question"), document.pop("category")
    return {**document, "tokens": len(found.answers["plain"].token_ids)}


class LlamaServer:
    """A llama.cpp server with the demo's GGUF file, asked over HTTP."""

    def __init__(self, url: str, tokenizer: Any) -> None:
        self.url, self._tokenizer = url, tokenizer

    def answer(self, question: str, max_tokens: int) -> dict[str, float]:
        """Same prompt tokens as ours; the server's own times, so that HTTP costs it nothing."""
        messages = [{"role": "user", "content": question}]
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        body = {"prompt": ids, "n_predict": max_tokens, "temperature": 0, "cache_prompt": False}
        started = time.perf_counter()
        got = self._post("/completion", body)
        outside = time.perf_counter() - started
        tokens, times = int(got["tokens_predicted"]), got["timings"]
        inside = (times["prompt_ms"] + times["predicted_ms"]) / 1e3
        return {
            "tokens": tokens, "tokens_per_second": tokens / inside,
            "seen_by_client": tokens / outside,
        }  # fmt: skip

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as response:
            return dict(json.load(response))


@contextmanager
def llama_server(
    program: Path | None, threads: int, tokenizer: Any
) -> Iterator[LlamaServer | None]:
    """The server on a free port while it is needed."""
    if program is None:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(program), "-m", str(gguf_path()), "--port", str(port), "-t", str(threads), "-c", "2048",
        "-np", "1",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        peer = LlamaServer(f"http://127.0.0.1:{port}", tokenizer)
        _wait(peer, process)
        peer.answer("Say hello.", 16)
        yield peer
    finally:
        process.terminate()
        process.wait()


def _wait(peer: LlamaServer, process: subprocess.Popen[bytes]) -> None:
    for _ in range(300):
        if process.poll() is not None:
            raise SystemExit(f"the llama.cpp server ended with code {process.returncode}")
        try:
            with urllib.request.urlopen(f"{peer.url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the llama.cpp server did not get ready within a minute")


def summary(rows: Sequence[dict[str, Any]], kinds: Sequence[str]) -> dict[str, Any]:
    """Means over questions: of all, and of each category."""
    groups = {"all": list(rows)}
    for row in rows:
        groups.setdefault(row["category"], []).append(row)
    result: dict[str, Any] = {}
    for kind in kinds:
        result[kind] = {
            name: mean_with_interval([row[kind]["speed_up"] for row in group])
            for name, group in groups.items()
        }
        for side in ("plain", "drafted"):
            rates = [row[kind]["tokens_per_second"][side] for row in rows]
            result[kind][f"{side} tokens/s"] = sum(rates) / len(rates)
        result[kind]["identical texts"] = sum(row[kind]["divergence"] is None for row in rows)
        lengths = [row[kind]["acceptance"]["acceptance_length"] for row in rows]
        result[kind]["mean acceptance length"] = sum(lengths) / len(lengths)
        if "llama.cpp" in rows[0]:
            ahead = [
                row[kind]["tokens_per_second"]["drafted"] / row["llama.cpp"]["tokens_per_second"]
                for row in rows
            ]
            result[kind]["over llama.cpp"] = mean_with_interval(ahead)
    if "llama.cpp" in rows[0]:
        rates = [row["llama.cpp"]["tokens_per_second"] for row in rows]
        result["llama.cpp tokens/s"] = sum(rates) / len(rates)
    return result


def mean_with_interval(values: Sequence[float]) -> dict[str, float]:
    draws = np.random.default_rng(0).choice(values, (DRAWS, len(values))).mean(axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return {"mean": float(np.mean(values)), "low": float(low), "high": float(high)}


def spread(questions: Sequence[Conversation], limit: int | None) -> list[Conversation]:
    """The first `limit` questions when categories take turns."""
    if limit is None:
        return list(questions)
    places: dict[str, int] = {}
    keyed = []
    for question in questions:
        places[question.category] = places.get(question.category, -1) + 1
        keyed.append((places[question.category], question))
    return [question for _, question in sorted(keyed, key=lambda pair: pair[0])][:limit]


def show(result: dict[str, Any], kinds: Sequence[str]) -> None:
    for kind in kinds:
        print(f"\n{kind}: speed-up over K = 0")
        for name, found in result[kind].items():
            if isinstance(found, dict):
                interval = f"{found['low']:.2f} to {found['high']:.2f}"
                print(f"  {name:<24} {found['mean']:.2f}x   {interval}")
            else:
                print(f"  {name:<24} {found:.2f}")
    if "llama.cpp tokens/s" in result:
        print(f"\nllama.cpp {result['llama.cpp tokens/s']:.1f} tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("questions", type=Path, help="MT-Bench's question file (JSONL)")
    parser.add_argument("--weights", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit", type=int, help="so many questions, categories in turn")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server program")
    parser.add_argument("--out", type=Path, help="all rows, as JSON")
    arguments = parser.parse_args()
    questions = spread(read_conversations(arguments.questions), arguments.limit)
    folder = ready()
    engines = {
        kind: open_engines(folder, weights=KINDS[kind], threads=arguments.threads)
        for kind in arguments.weights
    }
    tokenizer = engines[arguments.weights[0]]["plain"].prompts.tokenizer
    with llama_server(arguments.llama_server, arguments.threads, tokenizer) as peer:
        rows = list(measure(questions, engines, peer, arguments.max_tokens))
    result = summary(rows, arguments.weights)
    show(result, arguments.weights)
    if arguments.out:
        head = shipped_head()
        document = {
            "summary": result, "rows": rows, "threads": arguments.threads,
            "max_tokens": arguments.max_tokens, "head": head_digest(head) if head else None,
            "torch": torch.__version__, "python": platform.python_version(),
            "load_average": os.getloadavg(),
        }  # fmt: skip
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
