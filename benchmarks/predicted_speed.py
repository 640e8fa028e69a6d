"""Predicted and then measured speed-up of the demo's head, by category of MT-Bench.

    python benchmarks/predicted_speed.py mt_bench.jsonl --out result.json

For every format of weights and number of requests at once an engine without a head answers the
questions, which gives the texts. Then, in every turn, `score`'s own code predicts the speed of
K = 1 to 4 and of `auto` from those texts and from rounds that it times anew, and the questions are
answered by an engine without a head, and with each K and with `auto` by one that has it, in an
order that changes from category to category and from turn to turn. So a prediction and what it is
held against are a minute apart: a machine that is shared reads memory faster at one time and
computes faster at another, which changes what drafts bring. Of the turns the middle one counts, of
what was predicted and of what was measured; `turns_apart` in the rows says how far those of a row
were apart. Steps in which all requests decode count, as many requests as are asked for: what is
predicted is decoding at that load. Greedy, the draft vocabulary that ships.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
from engines_beside import beside
from result_files import save, table

from headstart.checkpoint.reader import Checkpoint
from headstart.data.conversations import Conversation, read_conversations
from headstart.data.records import Record
from headstart.demo.shipped import head_digest, shipped_head, shipped_vocab
from headstart.demo.unpacked import ready
from headstart.engine.engine import Engine
from headstart.engine.options import EngineOptions
from headstart.engine.output import Result
from headstart.predict.head_speed import open_prediction
from headstart.predict.options import PredictionOptions
from headstart.sampling.params import SamplingParams

WEIGHTS: dict[str, Literal["int8", "as-dtype"]] = {"int8": "int8", "fp32": "as-dtype"}
DRAFTS = (1, 2, 3, 4)
AUTO: Literal["auto"] = "auto"
ALL = "all"


@dataclass
class Speed:
    """Steps in which as many requests decoded as were asked for."""

    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: Speed) -> Speed:
        return Speed(self.tokens + other.tokens, self.seconds + other.seconds)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Engines:
    """One that has no head to keep in step, and one that drafts, of the same weights."""

    without: Engine
    drafting: Engine


def ask(
    engine: Engine, questions: Sequence[Conversation], params: SamplingParams, requests: int
) -> tuple[Speed, list[Result]]:
    """All questions, so many at a time; the next one starts when one has ended.

    Fewer questions than requests come several times: a batch is to be full.
    """
    count = max(len(questions), requests)
    waiting, ids, speed = [*islice(cycle(questions), count)], list[str](), Speed()
    while waiting or engine.has_work:
        running = engine.scheduler.running
        while waiting and len(running) + len(engine.scheduler.waiting) < requests:
            ids.append(engine.add([waiting.pop(0).messages[0]], params))
        is_whole = len(running) == requests and all(r.is_decoding for r in running)
        is_whole = is_whole and not engine.scheduler.waiting
        started = time.perf_counter()
        updates = engine.step()
        if is_whole:
            speed.seconds += time.perf_counter() - started
            speed.tokens += sum(len(update.token_ids) for update in updates)
    return speed, [engine.collect(name) for name in ids]


def record(result: Result, question: Conversation, number: int, params: SamplingParams) -> Record:
    """An answer as `distill` would have written it."""
    output = result.outputs[0]
    ids = np.array([*result.prompt_token_ids, *output.token_ids])
    num_prompt = len(result.prompt_token_ids)
    return Record(
        id=f"r{number}", prompt_id=question.id, category=question.category, turn=0, sample=0,
        ids=ids, mask=np.arange(len(ids)) >= num_prompt, seed=output.stats.seed,
        sampling={"temperature": 0.0, "max_tokens": params.max_tokens},
        finish_reason=output.finish_reason or "", exact_ids=True, num_prompt=num_prompt,
    )  # fmt: skip


def answers(
    folder: Path, options: EngineOptions, groups: dict[str, list[Conversation]], max_tokens: int
) -> tuple[SamplingParams, list[Record]]:
    """Without drafts: how all is sampled, and what an engine that is given up again writes."""
    engine = Engine(folder, options=options)
    plain = engine.prompts.default_params(
        temperature=0.0, max_tokens=max_tokens, speculate=0, ignore_eos=True
    )
    records: list[Record] = []
    for questions in groups.values():
        _, results = ask(engine, questions, plain, options.num_requests)
        for result, question in zip(results, questions, strict=False):
            records.append(record(result, question, len(records), plain))
    return plain, records


def compare(
    folder: Path, weights: str, requests: int, groups: dict[str, list[Conversation]],
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:  # fmt: skip
    """One row for each category and way of drafting, and for all categories together."""
    without = EngineOptions(
        speculate=0, weights=WEIGHTS[weights], max_running_requests=requests,
        max_model_len=2048, prefix_caching=False, kv_bytes=1 << 28,
    )  # fmt: skip
    plain, records = answers(folder, without, groups, arguments.max_tokens)
    gc.collect()
    drafting = Engine(folder, draft_vocab=shipped_vocab(), options=replace(without, speculate=AUTO))
    engines = Engines(beside(drafting, 0), drafting)
    asked = PredictionOptions(vocab=shipped_vocab(), requests=requests, weights=WEIGHTS[weights])
    turns = []
    for turn in range(arguments.turns):
        predicted = open_prediction(Checkpoint.open(folder), records, asked).run()
        gc.collect()
        turns.append((predicted, measured(engines, groups, plain, requests, turn)))
    print(f"{weights}, requests at once: {requests}; {turns[-1][0]['costs']}")
    rows = []
    for name in (ALL, *groups):
        for way in (*map(str, DRAFTS), AUTO):
            said = [predicted_of(found, name, way) for found, _ in turns]
            real = [speeds[name][way].rate / speeds[name]["0"].rate for _, speeds in turns]
            rows.append({
                "weights": weights, "requests": requests, "category": name, "drafts": way,
                "predicted": median(said), "measured": median(real),
                "off": median(said) / median(real) - 1,
                "tokens_per_second": median(speeds[name][way].rate for _, speeds in turns),
                "plain": median(speeds[name]["0"].rate for _, speeds in turns),
                "turns_apart": {"predicted": max(said) / min(said),
                                "measured": max(real) / min(real)},
            })  # fmt: skip
    show(rows)
    return rows


def predicted_of(found: dict[str, Any], category: str, way: str) -> float:
    """A speed-up that `score` reported."""
    part = found["results"][-1]
    part = part if category == ALL else part["by_category"][category]
    return float(part["auto_speed_up"] if way == AUTO else part["speed"][int(way)]["speed_up"])


def measured(
    engines: Engines, groups: dict[str, list[Conversation]], plain: SamplingParams, requests: int,
    turn: int,
) -> dict[str, dict[str, Speed]]:  # fmt: skip
    """Speeds by category, and of all, and by way of drafting."""
    ways: list[Any] = [0, *DRAFTS, AUTO]
    speeds: dict[str, dict[str, Speed]] = {}
    for place, (name, questions) in enumerate(groups.items()):
        first = (place + turn) % len(ways)
        speeds[name] = {
            str(way): ask(
                engines.drafting if way else engines.without, questions,
                replace(plain, speculate=way), requests,
            )[0]
            for way in ways[first:] + ways[:first]
        }  # fmt: skip
    own = list(speeds.values())
    speeds[ALL] = {str(way): sum((each[str(way)] for each in own), start=Speed()) for way in ways}
    return speeds


def show(rows: Sequence[dict[str, Any]]) -> None:
    for name in dict.fromkeys(row["category"] for row in rows):
        said = "  ".join(
            f"{row['drafts']}: {row['predicted']:.2f} {row['measured']:.2f} ({row['off']:+.1%})"
            for row in rows
            if row["category"] == name
        )
        print(f"  {name:<12} {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("questions", type=Path, help="MT-Bench's question file (JSONL)")
    parser.add_argument("--weights", nargs="*", choices=list(WEIGHTS), default=list(WEIGHTS))
    parser.add_argument("--requests", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--each", type=int, default=4, help="questions of each category")
    parser.add_argument("--max-tokens", type=int, default=96, help="every answer has so many")
    parser.add_argument("--turns", type=int, default=3, help="every question is asked so often")
    parser.add_argument("--out", type=Path, help="all rows, as JSON")
    arguments = parser.parse_args()
    groups: dict[str, list[Conversation]] = {}
    for question in read_conversations(arguments.questions):
        own = groups.setdefault(question.category, [])
        if len(own) < arguments.each:
            own.append(question)
    folder, head, rows = ready(), shipped_head(), list[dict[str, Any]]()
    for weights in arguments.weights:
        for requests in arguments.requests:
            rows += compare(folder, weights, requests, groups, arguments)
            if arguments.out:
                document = {
                    "rows": rows,
                    "max_tokens": arguments.max_tokens,
                    "each": arguments.each,
                    "turns": arguments.turns,
                    "head": head_digest(head) if head else None,
                }
                title = "Predicted and measured speed of the demo's head, CPU"
                save(arguments.out, title, document, tables(rows))
    print(about(rows))


def about(rows: Sequence[dict[str, Any]]) -> str:
    off = [abs(row["off"]) for row in rows]
    within = sum(each <= 0.05 for each in off)
    return f"within 5 %: {within} of {len(rows)}; mean {np.mean(off):.1%}, most {max(off):.1%}"


def tables(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One table for each format of weights and number of requests."""
    ways = [*map(str, DRAFTS), AUTO]
    lines = [about(rows) + ". Cells: predicted / measured (off).", ""]
    for weights, requests in dict.fromkeys((row["weights"], row["requests"]) for row in rows):
        own = [row for row in rows if (row["weights"], row["requests"]) == (weights, requests)]
        by_place = {(row["category"], row["drafts"]): row for row in own}
        cells = [
            [name, *(
                f"{row['predicted']:.2f} / {row['measured']:.2f} ({row['off']:+.1%})"
                for row in (by_place[name, way] for way in ways)
            )]
            for name in dict.fromkeys(row["category"] for row in own)
        ]  # fmt: skip
        lines += [f"## {weights}, requests at once: {requests}", ""]
        lines += [*table(["category", *(f"K = {way}" for way in ways)], cells), ""]
    return lines


if __name__ == "__main__":
    main()
