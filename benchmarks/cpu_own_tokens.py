"""Acceptance and speed of draft vocabularies with and without texts' own tokens, on a CPU.

    python benchmarks/cpu_own_tokens.py mt_bench.jsonl benchmarks/multilingual.jsonl \
        benchmarks/names_heavy.jsonl --out result.json

The demo's model, int8, K fixed, greedy. One engine drafts from the list that ships, one with each
limit of own tokens, and the first also from the whole vocabulary. All of them answer each prompt
one after another, in an order that changes; every text must be the same. Only steps in which a
token was written before count: prompts are read alike. Ratios are of all tokens over all seconds;
of each turn as well, to see the noise. A further table has the shortest seconds of each prompt.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headstart.data.conversations import Conversation, read_conversations
from headstart.demo.shipped import shipped_vocab
from headstart.demo.unpacked import ready
from headstart.engine.engine import Engine
from headstart.sampling.acceptance import Acceptance
from headstart.sampling.params import SamplingParams

WHOLE = "whole"


@dataclass
class Way:
    """One way of drafting, on one set of prompts."""

    engine: Engine
    vocab: str | None = None
    tokens: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    seconds: list[float] = field(default_factory=list)  # of each turn
    each: dict[str, list[float]] = field(default_factory=dict)  # by prompt, of each turn

    def answer(self, prompt: Conversation, params: SamplingParams, turn: int) -> list[int]:
        engine = self.engine
        name = engine.add([prompt.messages[0]], params)
        spent = 0.0
        while engine.has_work:
            begun = any(request.num_output for request in engine.scheduler.running)
            started = time.perf_counter()
            engine.step()
            spent += (time.perf_counter() - started) * begun
        result = engine.collect(name)
        if len(self.seconds) <= turn:
            self.seconds.append(0.0)
        self.seconds[turn] += spent
        self.each.setdefault(prompt.id, []).append(spent)
        if turn == 0:
            self.tokens += len(result.outputs[0].token_ids) - 1
            self.acceptance.add(result.stats.acceptance)
        return result.outputs[0].token_ids


def measure(
    name: str, prompts: Sequence[Conversation], engines: dict[str, Engine],
    given: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    ways = {way: Way(engine) for way, engine in engines.items()}
    ways[WHOLE] = Way(engines["list"], "full")
    for turn in range(given.turns):
        for number, prompt in enumerate(prompts):
            order = list(ways)[(number + turn) % len(ways) :] + list(ways)
            texts = []
            for way in dict.fromkeys(order):
                params = SamplingParams(
                    temperature=0, max_tokens=given.max_tokens, draft_vocab=ways[way].vocab
                )
                texts.append(ways[way].answer(prompt, params, turn))
            assert all(text == texts[0] for text in texts), "texts differ"
    base = ways["list"]
    rows = {}
    for way, own in ways.items():
        shortest = [sum(min(times) for times in each.each.values()) for each in (base, own)]
        rows[way] = {
            "acceptance_length": own.acceptance.length,
            "tokens_per_second": own.tokens * given.turns / sum(own.seconds),
            "to_list": sum(base.seconds) / sum(own.seconds),
            "to_list_by_turn": [a / b for a, b in zip(base.seconds, own.seconds, strict=True)],
            "to_list_shortest": shortest[0] / shortest[1],
        }
        said = {k: [round(x, 3) for x in v] if isinstance(v, list) else round(v, 3)
                for k, v in rows[way].items()}  # fmt: skip
        print(f"{name} {way}: {json.dumps(said)}", flush=True)
    return {"set": name, "prompts": len(prompts), "tokens": base.tokens, "ways": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="+", type=Path, help="files of prompts (JSONL)")
    parser.add_argument("--own", nargs="*", type=int, default=[512], help="limits to compare")
    parser.add_argument("--speculate", type=int, default=3)
    parser.add_argument("--weights", default="int8", choices=["int8", "as-dtype"])
    parser.add_argument("--prompts", type=int, default=16, help="of each set at most, spread")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    model, engines = ready(), {}
    for own in (0, *given.own):
        engines[f"own {own}" if own else "list"] = Engine(
            model, speculate=given.speculate, weights=given.weights, dtype="float32",
            draft_vocab=str(shipped_vocab()), draft_vocab_own=own, prefix_caching=False,
            max_running_requests=1, max_model_len=2048,
        )  # fmt: skip
    for engine in engines.values():
        engine.warm_up()
    rows = []
    for path in given.sets:
        prompts = list(read_conversations(path))
        step = max(1, len(prompts) // given.prompts)
        rows.append(measure(path.stem, prompts[::step][: given.prompts], engines, given))
    if given.out is not None:
        document = {
            "processor": platform.processor(), "threads": torch.get_num_threads(),
            "torch": torch.__version__, "options": {k: str(v) for k, v in vars(given).items()},
            "sets": rows,
        }  # fmt: skip
        given.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
