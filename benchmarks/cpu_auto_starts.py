"""`auto` on a CPU against every fixed K, over many starts, half of them on a busy machine.

    python benchmarks/cpu_auto_starts.py mt_bench.jsonl --out result.json

Every start makes a new engine of the demo's model that drafts by `auto` and knows nothing. It
answers one question of each category, in turns with engines of a fixed K that were there before:
always the one steps that has used less time, so that all see the machine in the same state. In
every other start another process takes a core for the first ten seconds, the engine's own profile
included. Only time inside an engine counts, from the first token of an answer on.

The best fixed K is the one with the most tokens per second over all starts together; of single
starts the best one is given as well, which is partly luck.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headstart.data.conversations import Conversation, read_conversations
from headstart.demo.shipped import shipped_vocab
from headstart.demo.unpacked import ready
from headstart.engine.engine import Engine
from headstart.engine.options import EngineOptions
from headstart.sampling.params import SamplingParams

AUTO = "auto"
WEIGHTS = {"int8": "int8", "fp32": "as-dtype"}
BUSY_SECONDS = 10.0
_BUSY = f"import time; t = time.time()\nwhile time.time() - t < {BUSY_SECONDS}: pass"


@dataclass
class Runner:
    """One engine's part in a start."""

    engine: Engine
    tokens: int = 0
    seconds: float = 0.0  # of decoding
    used: float = 0.0  # of everything, by which turns are taken
    reasons: list[str] = field(default_factory=list)

    def step(self) -> None:
        begun = any(request.num_output for request in self.engine.scheduler.running)
        started = time.perf_counter()
        updates = self.engine.step()
        took = time.perf_counter() - started
        self.used += took
        if begun:
            self.seconds += took
            self.tokens += sum(len(update.token_ids) for update in updates)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def options(weights: str, speculate: Any) -> EngineOptions:
    return EngineOptions(
        speculate=speculate, weights=WEIGHTS[weights], max_running_requests=1, max_model_len=2048,
        prefix_caching=False, kv_bytes=1 << 27,
    )  # fmt: skip


def answer(runners: dict[str, Runner], question: Conversation, params: SamplingParams) -> None:
    """All engines answer one question, in turns by the time that each has used."""
    prompt = [question.messages[0]]
    ids = {name: runner.engine.add(prompt, params) for name, runner in runners.items()}
    used = dict.fromkeys(runners, 0.0)
    while waiting := [name for name in runners if runners[name].engine.has_work]:
        name = min(waiting, key=lambda each: used[each])
        before = runners[name].used
        runners[name].step()
        used[name] += runners[name].used - before
    for name, runner in runners.items():
        runner.engine.collect(ids[name])
    engine = runners[AUTO].engine
    runners[AUTO].reasons.append(f"{question.category}: {engine.stats.draft_reason}")


def start(
    number: int, folder: Path, fixed: dict[str, Engine], questions: Sequence[Conversation],
    arguments: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    is_busy = number % 2 == 1
    other = subprocess.Popen([sys.executable, "-c", _BUSY]) if is_busy else None
    try:
        engine = Engine(
            folder, options=options(arguments.weights, AUTO), draft_vocab=shipped_vocab()
        )
        runners = {AUTO: Runner(engine), **{k: Runner(each) for k, each in fixed.items()}}
        params = engine.prompts.default_params(temperature=0.0, max_tokens=arguments.max_tokens)
        for question in questions:
            answer(runners, question, params)
    finally:
        if other is not None:
            other.kill()
            other.wait()
    chosen: Counter[int] = engine.stats.chosen_drafts
    speeds = {name: runner.speed for name, runner in runners.items()}
    best = max(fixed, key=lambda name: speeds[name])
    ratio = speeds[AUTO] / speeds[best]
    said = ", ".join(f"{name} {speed:.1f}" for name, speed in speeds.items())
    print(
        f"start {number + 1}{' (busy)' if is_busy else ''}: {said} tokens/s; auto over the best of "
        f"this start (K = {best}) {ratio:.3f}; rounds by K {dict(sorted(chosen.items()))}",
        flush=True,
    )
    return {
        "busy": is_busy, "tokens_per_second": speeds, "chosen": dict(sorted(chosen.items())),
        "seconds": {name: runner.seconds for name, runner in runners.items()},
        "tokens": {name: runner.tokens for name, runner in runners.items()},
        "reasons": runners[AUTO].reasons,
    }  # fmt: skip


def summary(starts: Sequence[dict[str, Any]], ks: Sequence[str]) -> dict[str, Any]:
    """Speeds over all starts, and `auto` over the K that was best in all of them."""
    total = {
        name: sum(s["tokens"][name] for s in starts) / sum(s["seconds"][name] for s in starts)
        for name in (AUTO, *ks)
    }
    best = max(ks, key=lambda name: total[name])
    ratios = [s["tokens_per_second"][AUTO] / s["tokens_per_second"][best] for s in starts]
    own = [s["tokens_per_second"][AUTO] / max(s["tokens_per_second"][k] for k in ks)
           for s in starts]  # fmt: skip
    return {
        "tokens_per_second": total, "best_fixed": best, "auto_over_best": total[AUTO] / total[best],
        "by_start": ratios, "least": min(ratios), "over_best_of_each_start": own,
        "mean_over_best_of_each_start": sum(own) / len(own),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("questions", type=Path, help="MT-Bench's question file (JSONL)")
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--weights", choices=list(WEIGHTS), default="int8")
    parser.add_argument("--drafts", nargs="*", type=int, default=[1, 2, 3, 4], help="fixed K")
    parser.add_argument("--max-tokens", type=int, default=112)
    parser.add_argument("--out", type=Path, help="all starts, as JSON")
    arguments = parser.parse_args()
    by_category: dict[str, list[Conversation]] = {}
    for question in read_conversations(arguments.questions):
        by_category.setdefault(question.category, []).append(question)
    folder = ready()
    fixed = {
        str(k): Engine(folder, options=options(arguments.weights, k), draft_vocab=shipped_vocab())
        for k in arguments.drafts
    }
    for engine in fixed.values():
        engine.warm_up()
    starts = []
    for number in range(arguments.starts):
        asked = [own[number % len(own)] for own in by_category.values()]
        asked = asked[number % len(asked) :] + asked[: number % len(asked)]
        starts.append(start(number, folder, fixed, asked, arguments))
    found = summary(starts, list(fixed))
    print(json.dumps({name: value for name, value in found.items() if name != "by_start"}))
    if arguments.out:
        document = {
            "summary": found, "starts": starts, "weights": arguments.weights,
            "max_tokens": arguments.max_tokens, "torch": torch.__version__,
            "threads": torch.get_num_threads(), "python": platform.python_version(),
            "load_average": os.getloadavg(),
        }  # fmt: skip
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
