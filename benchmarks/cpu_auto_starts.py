"""`auto` on a CPU against every fixed K, over many starts, half of them on a busy machine.

    python benchmarks/cpu_auto_starts.py mt_bench.jsonl --out result.json

Every start makes a new engine of the demo's model that drafts by `auto` and knows nothing. It
answers one question of each category by `auto`, and the same question with each fixed K, in an
order that changes; with a fixed K a policy of its own decides, so that `auto` learns nothing from
it. All draft with the head alone, since a fixed K copies nothing from the context; with `--copies`
`auto` copies, too, and is ahead by that. In every other start another process takes a core for the
first ten seconds, the engine's own profile included. Only time inside the engine counts, from the
first token of an answer on.

The best fixed K is the one with the most tokens per second over all starts together; of single
starts the best one is given as well, which is partly luck.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from result_files import save, table

from headstart.data.conversations import Conversation, read_conversations
from headstart.demo.shipped import shipped_vocab
from headstart.demo.unpacked import ready
from headstart.engine.auto.policy import DraftPolicy
from headstart.engine.engine import Engine
from headstart.engine.options import EngineOptions, Speculate
from headstart.sampling.params import SamplingParams

AUTO: Literal["auto"] = "auto"
WEIGHTS: dict[str, Literal["int8", "as-dtype"]] = {"int8": "int8", "fp32": "as-dtype"}
BUSY_SECONDS = 10.0
_BUSY = f"import time; t = time.time()\nwhile time.time() - t < {BUSY_SECONDS}: pass"


@dataclass
class Runner:
    """One way of choosing K, in one start."""

    policy: DraftPolicy
    tokens: int = 0
    seconds: float = 0.0  # of decoding

    def answer(self, engine: Engine, question: Conversation, params: SamplingParams) -> None:
        sources, times = engine.loop.sources, engine.loop.times
        assert sources is not None
        engine.policy = engine.loop.policy = sources.policy = times.policy = self.policy
        name = engine.add([question.messages[0]], params)
        while engine.has_work:
            begun = any(request.num_output for request in engine.scheduler.running)
            started = time.perf_counter()
            updates = engine.step()
            if begun:
                self.seconds += time.perf_counter() - started
                self.tokens += sum(len(update.token_ids) for update in updates)
        engine.collect(name)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def options(weights: str, speculate: Speculate) -> EngineOptions:
    return EngineOptions(
        speculate=speculate, weights=WEIGHTS[weights], max_running_requests=1, max_model_len=2048,
        prefix_caching=False, kv_bytes=1 << 27,
    )  # fmt: skip


def start(
    number: int, folder: Path, questions: Sequence[Conversation], arguments: argparse.Namespace
) -> dict[str, Any]:
    is_busy = number % 2 == 1
    other = subprocess.Popen([sys.executable, "-c", _BUSY]) if is_busy else None
    try:
        engine = Engine(
            folder, options=options(arguments.weights, AUTO), draft_vocab=shipped_vocab()
        )
        assert engine.policy is not None
        runners: dict[str, Runner] = {AUTO: Runner(engine.policy)}
        for k in arguments.drafts:
            fixed = options(arguments.weights, k)
            runners[str(k)] = Runner(DraftPolicy(fixed, engine.model.max_len))
        params = engine.prompts.default_params(
            temperature=0.0, max_tokens=arguments.max_tokens,
            draft_from="auto" if arguments.copies else "head",
        )  # fmt: skip
        reasons = []
        for place, question in enumerate(questions):
            names = list(runners)
            turn = (number + place) % len(names)
            for name in names[turn:] + names[:turn]:
                before = engine.stats.chosen_drafts
                runners[name].answer(engine, question, params)
                if name == AUTO:
                    chosen = engine.stats.chosen_drafts - before
                    rounds = " ".join(f"{k}:{n}" for k, n in sorted(chosen.items()))
                    reasons.append(f"{question.category}, rounds by K {rounds}: "
                                   f"{engine.stats.draft_reason}")  # fmt: skip
    finally:
        if other is not None:
            other.kill()
            other.wait()
    speeds = {name: runner.speed for name, runner in runners.items()}
    best = max((name for name in runners if name != AUTO), key=lambda name: speeds[name])
    said = ", ".join(f"{name} {speed:.1f}" for name, speed in speeds.items())
    print(
        f"start {number + 1}{' (busy)' if is_busy else ''}: {said} tokens/s; auto over the best of "
        f"this start (K = {best}) {speeds[AUTO] / speeds[best]:.3f}",
        flush=True,
    )
    if arguments.reasons:
        print("  " + "\n  ".join(reasons), flush=True)
    return {
        "busy": is_busy, "tokens_per_second": speeds, "reasons": reasons,
        "seconds": {name: runner.seconds for name, runner in runners.items()},
        "tokens": {name: runner.tokens for name, runner in runners.items()},
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
    parser.add_argument("--copies", action="store_true", help="let `auto` copy from the context")
    parser.add_argument("--reasons", action="store_true", help="why `auto` chose, by question")
    parser.add_argument("--out", type=Path, help="all starts, as JSON")
    arguments = parser.parse_args()
    by_category: dict[str, list[Conversation]] = {}
    for question in read_conversations(arguments.questions):
        by_category.setdefault(question.category, []).append(question)
    folder = ready()
    starts = []
    for number in range(arguments.starts):
        asked = [own[number % len(own)] for own in by_category.values()]
        asked = asked[number % len(asked) :] + asked[: number % len(asked)]
        starts.append(start(number, folder, asked, arguments))
        found = summary(starts, [str(k) for k in arguments.drafts])
        if arguments.out:
            document = {
                "summary": found,
                "starts": starts,
                "weights": arguments.weights,
                "max_tokens": arguments.max_tokens,
                "copies": arguments.copies,
            }
            title = "`auto` on a CPU over many starts, half of them on a busy machine"
            save(arguments.out, title, document, tables(found, starts, copies=arguments.copies))
    print(json.dumps({name: value for name, value in found.items() if name != "by_start"}))


def tables(found: dict[str, Any], starts: Sequence[dict[str, Any]], *, copies: bool) -> list[str]:
    """`auto` over the best fixed K, of all starts together and of each."""
    speeds = ", ".join(f"{k} {speed:.1f}" for k, speed in found["tokens_per_second"].items())
    rows = [
        [str(number), "yes" if each["busy"] else "no",
         *(f"{speed:.1f}" for speed in each["tokens_per_second"].values()), f"{ratio:.3f}"]
        for number, (each, ratio) in enumerate(zip(starts, found["by_start"], strict=True), 1)
    ]  # fmt: skip
    names = [*starts[0]["tokens_per_second"]]
    return [
        f"Tokens/s over {len(starts)} starts: {speeds}. The best fixed K is {found['best_fixed']}; "
        f"`auto` has {found['auto_over_best']:.3f} of it, at least {found['least']:.3f} in a "
        f"start, and {found['mean_over_best_of_each_start']:.3f} of the best K of each start. "
        + ("`auto` also copied from the context." if copies else "All drafted by the head alone."),
        "",
        *table(["start", "busy", *names, "auto over the best K"], rows),
    ]


if __name__ == "__main__":
    main()
