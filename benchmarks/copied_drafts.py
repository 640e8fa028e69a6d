"""Drafts from the context beside the head, on a CPU: `auto`, the head alone, and copies alone.

    python benchmarks/copied_drafts.py benchmarks/copy_heavy.jsonl --out result.json
    python benchmarks/copied_drafts.py mt_bench.jsonl --out result.json
    python benchmarks/copied_drafts.py benchmarks/copy_heavy.jsonl --predict result.json --repeats 3

The demo's model, greedy, one request at a time, answers of at most 256 tokens. Four engines, which
share one model's weights (`engines_beside.py`), answer each prompt in turns of some steps, so that
all see the machine in the same state and each finds the caches as it left them, but for a turn's
first step: without drafts, with the head alone (`auto`, draft_from head), with copies alone
(speculate context), and with both (`auto`). Time inside an engine counts, once with and once
without the prompt's. Speeds are tokens of all prompts over seconds of all. With `--repeats` all
prompts are answered several times, one after another, and all times count. Answers that loop (a
span three times in a row) count apart.

With `--predict` the code of `score` predicts by category what is measured, from the answers that an
earlier run wrote down and from rounds that it times: before the first prompt, and again after every
few. A shared machine reads memory faster for some minutes and computes faster for others, which
changes what drafts bring by a tenth and more; so prompts are held against the mean of the
predictions right before and after them. Such answers come from `--sides auto` alone, too. `--out`
has a page with tables beside it, and all figures so far.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from copied_figures import ALL, LOOPS, compared, joined, summaries, tables
from copied_spans import copied_share, loops
from engines_beside import beside
from result_files import save

from headstart.checkpoint.reader import Checkpoint
from headstart.data.conversations import Conversation, read_conversations
from headstart.data.records import Record
from headstart.demo.shipped import head_digest, shipped_head, shipped_vocab
from headstart.demo.unpacked import ready
from headstart.engine.engine import Engine
from headstart.engine.options import EngineOptions
from headstart.engine.output import Completion
from headstart.predict.head_speed import open_prediction
from headstart.predict.options import PredictionOptions
from headstart.sampling.params import SamplingParams

SIDES = ("plain", "head", "context", "auto")
PREDICTED_EVERY = 39  # prompts: a prediction takes a minute or more
TURN = 24  # steps; where engines take turns step by step, each finds its caches full of the others'


@dataclass
class Side:
    """One engine with one answer under way."""

    engine: Engine
    params: SamplingParams
    request_id: str = ""
    seconds: float = 0.0
    prompt_seconds: float | None = None  # until the first token

    def begin(self, prompt: Conversation) -> None:
        self.seconds, self.prompt_seconds = 0.0, None
        self.request_id = self.engine.add([prompt.messages[0]], self.params)

    def step(self) -> None:
        started = time.perf_counter()
        updates = self.engine.step()
        self.seconds += time.perf_counter() - started
        if updates and self.prompt_seconds is None:
            self.prompt_seconds = self.seconds


def open_sides(
    names: Sequence[str], weights: Any, max_tokens: int, threads: int | None
) -> dict[str, Side]:
    options = EngineOptions(
        speculate="auto", weights=weights, threads=threads or torch.get_num_threads(),
        max_running_requests=len(names), max_model_len=2048, prefix_caching=False,
    )  # fmt: skip
    first = Engine(ready(), options=options, draft_vocab=shipped_vocab())
    kinds: dict[str, Any] = {"plain": 0, "head": "auto", "context": "context", "auto": "auto"}
    sides = {}
    for name in names:
        engine = beside(first, kinds[name])
        params = engine.prompts.default_params(temperature=0.0, max_tokens=max_tokens)
        params = replace(params, draft_from="head") if name == "head" else params
        sides[name] = Side(engine, params)
    return sides


def answer(sides: dict[str, Side], prompt: Conversation) -> dict[str, Completion]:
    """All engines in turns: always the one that has used least time."""
    for side in sides.values():
        side.begin(prompt)
    while going := [side for side in sides.values() if side.engine.has_work]:
        next_one = min(going, key=lambda side: side.seconds)
        for _ in range(TURN):
            if next_one.engine.has_work:
                next_one.step()
    return {name: side.engine.collect(side.request_id).outputs[0] for name, side in sides.items()}


def measure(sides: dict[str, Side], prompts: Sequence[Conversation]) -> Iterator[dict[str, Any]]:
    for number, prompt in enumerate(prompts, 1):
        said = answer(sides, prompt)
        first = next(iter(sides))
        ids = sides[first].engine.prompts.read([prompt.messages[0]])
        tokens = said[first].token_ids
        row = {
            "id": prompt.id, "category": prompt.category, "tokens": len(tokens),
            "identical": all(one.token_ids == tokens for one in said.values()),
            "copied_share": copied_share(ids, tokens), "loops": loops(tokens), "answer": tokens,
            "prompt_tokens": list(ids), "finish_reason": said[first].finish_reason,
            "seconds": {name: side.seconds for name, side in sides.items()},
            "prompt_seconds": {name: side.prompt_seconds for name, side in sides.items()},
            "accepted_copies": {n: one.stats.copied_accepted for n, one in said.items()},
            "acceptance_length": {n: one.stats.acceptance.length for n, one in said.items()},
        }  # fmt: skip
        speeds = " ".join(f"{n} {len(tokens) / side.seconds:.1f}" for n, side in sides.items())
        print(f"{number}/{len(prompts)} {prompt.id}: {speeds} tokens/s", flush=True)
        yield row


def predicted(rows: Sequence[dict[str, Any]], given: argparse.Namespace) -> dict[str, Any]:
    """What `score` says of these answers, by part: speeds over no drafts."""
    records = []
    for row in rows:
        ids, num_prompt = [*row["prompt_tokens"], *row["answer"]], len(row["prompt_tokens"])
        records.append(Record(
            id=row["id"], prompt_id=row["id"], turn=0, sample=0, ids=np.array(ids),
            category=LOOPS if row["loops"] else row["category"],
            mask=np.arange(len(ids)) >= num_prompt, seed=0, exact_ids=True, num_prompt=num_prompt,
            sampling={"temperature": 0.0, "max_tokens": given.max_tokens},
            finish_reason=row["finish_reason"],
        ))  # fmt: skip
    options = PredictionOptions(vocab=shipped_vocab(), weights=given.weights)
    found = open_prediction(Checkpoint.open(ready()), records, options).run()
    gc.collect()
    print(f"costs of the prediction: {found['costs']}", flush=True)
    last = found["results"][-1]  # with the draft vocabulary
    names = {name: f"{name}_speed_up" for name in SIDES[1:]}
    return {
        part: {side: own[name] for side, name in names.items() if side in given.sides}
        for part, own in {ALL: last, **last["by_category"]}.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", type=Path, help="prompts or conversations (JSONL)")
    parser.add_argument("--weights", choices=["int8", "int4", "as-dtype"], default="int8")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--limit", type=int, help="this many prompts of each category")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=1, help="of all prompts")
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES))
    parser.add_argument("--predict", type=Path, help="result of an earlier run, with its answers")
    parser.add_argument("--out", type=Path, help="all rows, as JSON")
    arguments = parser.parse_args()
    groups: dict[str, list[Conversation]] = {}
    for prompt in read_conversations(arguments.prompts):
        groups.setdefault(prompt.category, []).append(prompt)
    # Categories in turns: what a machine does meanwhile hits all of them.
    turns = zip_longest(*(own[: arguments.limit] for own in groups.values()))
    prompts = [one for turn in turns for one in turn if one is not None]
    said = list[dict[str, Any]]()
    names = [name for name in SIDES if name in arguments.sides]
    before = list[dict[str, Any]]()
    if arguments.predict is not None:
        known = {row["id"]: row for row in json.loads(arguments.predict.read_text())["rows"]}
        before = [known[prompt.id] for prompt in prompts]
        said.append(predicted(before, arguments))
    sides = open_sides(names, arguments.weights, arguments.max_tokens, arguments.threads)
    answer(sides, prompts[0])  # warms up
    head, rows, found = shipped_head(), list[dict[str, Any]](), dict[str, Any]()
    comparison: list[dict[str, Any]] = []
    for row in measure(sides, prompts * arguments.repeats):
        rows.append(row)
        found = summaries(joined(rows))
        if before and len(rows) % PREDICTED_EVERY == 0:
            said.append(predicted(before, arguments))
        if said:
            comparison = compared(said, rows, PREDICTED_EVERY)
        if arguments.out:
            document = {
                "summary": found, "predicted": comparison, "said": said, "rows": rows,
                "weights": arguments.weights, "max_tokens": arguments.max_tokens,
                "head": head_digest(head) if head else None,
            }  # fmt: skip
            title = "Drafts from the context beside the head, CPU"
            save(arguments.out, title, document, tables(found, comparison))
    print("\n".join(tables(found, comparison)))


if __name__ == "__main__":
    main()
