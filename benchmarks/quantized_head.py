"""What a quantised head brings on a CPU: answers of the demo's model with each head, in turns.

    python benchmarks/quantized_head.py QUESTIONS.jsonl HEAD [HEAD ...] [--weights as-dtype int8]
        [--speculate 3] [--whole] [--limit 8] [--tokens 128] [--threads 2] [--out FILE.json]

HEADs are what `headstart quantize demo` wrote; the model's own head is the one that they are
compared with. Drafts are chosen among the vocabulary that ships with the demo, or all (--whole).
Contenders answer each question in turns, greedily, one request at a time; what counts is the time
from the first token on. Speeds are medians over questions, ratios medians of the questions'
ratios. Texts of one kind of weights have to be the same. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headstart import demo
from headstart.backends.options import Weights
from headstart.checkpoint.reader import Checkpoint
from headstart.data.conversations import read_conversations
from headstart.data.prompt_reader import PromptReader
from headstart.demo.shipped import shipped_vocab
from headstart.engine.engine import Engine
from headstart.sampling.params import SamplingParams

OWN = "own"


def timed(engine: Engine, prompt: Sequence[int], tokens: int) -> tuple[float, list[int], float]:
    """Tokens per second after the first step, the answer, and its acceptance length."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    name, first, count, is_finished = engine.add(list(prompt), params), 0.0, 0, False
    while not is_finished:
        updates = engine.step()
        if updates and not count:
            first, count = time.perf_counter(), len(updates[0].token_ids)
        is_finished = any(update.finish_reason for update in updates)
    seconds = time.perf_counter() - first
    output = engine.collect(name).outputs[0]
    ids = list(output.token_ids)
    return (len(ids) - count) / seconds, ids, output.stats.acceptance.length


def engines(given: argparse.Namespace, weights: Weights) -> dict[str, Engine]:
    vocab = None if given.whole else shipped_vocab()
    heads: dict[str, Path | None] = {OWN: None, **{head.name: head for head in given.heads}}
    return {
        name: Engine(
            demo.folder(), head, device="cpu", speculate=given.speculate, weights=weights,
            threads=given.threads, max_running_requests=1, prefix_caching=False,
            draft_vocab=vocab,
        )
        for name, head in heads.items()
    }  # fmt: skip


def compared(
    given: argparse.Namespace, weights: Weights, prompts: list[list[int]]
) -> dict[str, Any]:
    found = engines(given, weights)
    speeds: dict[str, list[float]] = {name: [] for name in found}
    lengths: dict[str, list[float]] = {name: [] for name in found}
    differ = 0
    for number, prompt in enumerate([prompts[0], *prompts]):
        texts = set()
        names = list(found)
        turn = number % len(names)  # each is the first as often as others
        for name in (*names[turn:], *names[:turn]):
            speed, ids, length = timed(found[name], prompt, given.tokens)
            texts.add(tuple(ids))
            if number:  # the first round warms up
                speeds[name].append(speed)
                lengths[name].append(length)
        differ += number > 0 and len(texts) > 1
    own = speeds[OWN]
    return {
        "weights": weights, "questions": len(prompts), "texts_that_differ": differ,
        "heads": {
            name: {
                "tokens_per_second": round(statistics.median(speeds[name]), 1),
                "over_own": round(
                    statistics.median(a / b for a, b in zip(speeds[name], own, strict=True)), 3
                ),
                "acceptance_length": round(statistics.mean(lengths[name]), 3),
            }
            for name in found
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", type=Path)
    parser.add_argument("heads", type=Path, nargs="+")
    parser.add_argument("--weights", nargs="*", default=["as-dtype", "int8"])
    parser.add_argument("--speculate", type=int, default=3)
    parser.add_argument("--whole", action="store_true", help="draft from the whole vocabulary")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    reader = PromptReader(Checkpoint.open(demo.folder()))
    asked = [str(each.messages[0]["content"]) for each in read_conversations(given.questions)]
    step = max(1, len(asked) // given.limit)
    prompts = [
        reader.read([{"role": "user", "content": text}]) for text in asked[::step][: given.limit]
    ]
    rows = []
    for weights in given.weights:
        rows.append(compared(given, weights, prompts))
        print(json.dumps(rows[-1]), flush=True)
    result = {"speculate": given.speculate, "whole": given.whole, "rows": rows}
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
