"""Swaps of the head while requests decode: texts, acceptance, and the longest gap between outputs.

PYTHONPATH=. python3 benchmarks/gpu_head_swap.py MODEL [--requests 16] [--answer 600] [--swaps 4]
    [--seeded 4] [--draft-vocab 4096]

MODEL is a calibrated checkpoint. A batch is answered without swaps, then with some, in turns to a
head with noise in its fusion and back. Each head is prepared by another thread while rounds run, as
a server does it, and swapped between two steps. Every greedy text must be the cycle that the trunk
walks. Of the seeded ones (the last of the requests) it is counted how many are those of the first
run: without swaps this shows what rounding alone changes. With --draft-vocab drafts come from so
many tokens, and another list comes with the weak head.
Prints the gaps between outputs of a request (median, 99th percentile, longest) with and without
swaps, what the other thread was doing when the longest ones ended, what preparing and swapping
took, and the acceptance in the steps before and after each swap.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from head_swap import disturbed

from headstart.backends import head_swap
from headstart.backends.cuda.backend import CudaBackend
from headstart.calibrate.calibrated import agreement_of
from headstart.engine.engine import Engine
from headstart.heads.export import plan_export
from headstart.heads.formats import open_head
from headstart.models import build
from headstart.sampling.params import SamplingParams
from headstart.vocab.draft_vocab import DraftVocab

_LONGEST = 6  # gaps whose part of preparing is shown


class Phases:
    """When the parts of preparing a head began and ended."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, float, float]] = []

    def watch(self, owner: Any, name: str) -> Any:
        """Replace a function by itself, watched, until the patch that is given back is stopped."""
        real = getattr(owner, name)

        def watched(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return real(*given, **named)
            finally:
                self._spans.append((name, began, time.perf_counter()))

        return mock.patch.object(owner, name, watched)

    def during(self, began: float, ended: float) -> list[str]:
        return [name for name, start, stop in self._spans if start < ended and stop > began]


PHASES = Phases()
WATCHED = (
    (build, "head_modules"), (build, "load_stored_head"), (CudaBackend, "hold_head"),
    (head_swap, "matched"), (CudaBackend, "swap_head"),
)  # fmt: skip


def answered(
    engine: Engine, asked: list[list[int]], following: list[int], given: argparse.Namespace,
    heads: list[tuple[Path, DraftVocab | None]], seeded: dict[int, list[int]],
) -> dict[str, Any]:  # fmt: skip
    """All prompts at once, with the heads swapped in at equal distances.

    seeded: texts of the first run by place of the request; that run fills it.
    """
    params = SamplingParams(temperature=0, max_tokens=given.answer, ignore_eos=True)
    first_seeded = len(asked) - given.seeded
    ids = [
        engine.add(
            prompt,
            params if place < first_seeded else replace(params, temperature=0.8, seed=place),
        )
        for place, prompt in enumerate(asked)
    ]
    last = dict.fromkeys(ids, 0.0)
    gaps: list[float] = []
    ends: list[tuple[float, float]] = []  # of steps: how long after the one before, and when
    total, left = len(asked) * given.answer, list(heads)
    swaps: list[tuple[float, float]] = []
    done, parts = 0, [[0, 0]]  # of each stretch between swaps: rounds, accepted
    with ThreadPoolExecutor(1) as pool:
        preparing: Future[Any] | None = None
        began = 0.0
        while engine.has_work:
            before = engine.stats.acceptance
            updates = engine.step()
            now = time.perf_counter()
            if ends or updates:
                ends.append((now - (ends[-1][1] if ends else now), now))
            after = engine.stats.acceptance
            parts[-1][0] += after.rounds - before.rounds
            parts[-1][1] += sum(after.accepted) - sum(before.accepted)
            for update in updates:
                if last[update.request_id]:
                    gaps.append(now - last[update.request_id])
                last[update.request_id] = now
                done += len(update.token_ids)
            if left and preparing is None and done > total * (len(swaps) + 1) / (len(heads) + 1):
                began = time.perf_counter()
                preparing = pool.submit(engine.prepare_head, *left.pop(0))
            elif preparing is not None and preparing.done():
                prepared, ready = preparing.result(), time.perf_counter()
                engine.swap_head(prepared)
                swaps.append((ready - began, time.perf_counter() - ready))
                preparing = None
                parts.append([0, 0])
    texts = [engine.collect(name).outputs[0].token_ids for name in ids]
    same = [
        seeded.setdefault(place, text) == text
        for place, text in enumerate(texts)
        if place >= first_seeded
    ]
    for prompt, text in zip(asked[:first_seeded], texts, strict=False):
        token = prompt[-1]
        for chosen in text:
            assert chosen == following[token], "the text is not the cycle's"
            token = chosen
    gaps.sort()
    return {
        "gap_ms": {
            "median": round(1e3 * gaps[len(gaps) // 2], 3),
            "p99": round(1e3 * gaps[int(0.99 * len(gaps))], 3),
            "longest": round(1e3 * gaps[-1], 3),
        },
        "longest_ms": [
            [round(1e3 * gap, 2), *PHASES.during(at - gap, at)]
            for gap, at in sorted(ends)[: -_LONGEST - 1 : -1]
        ],
        "prepare_and_swap_ms": [[round(1e3 * part, 2) for part in each] for each in swaps],
        "seeded_texts_same": [sum(same), len(same)],
        "acceptance_length": [
            round(1 + accepted / max(1, rounds), 3) for rounds, accepted in parts
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--answer", type=int, default=600)
    parser.add_argument("--seeded", type=int, default=4, help="of the requests")
    parser.add_argument("--swaps", type=int, default=4)
    parser.add_argument("--speculate", type=int, default=3)
    parser.add_argument("--draft-weights", default="auto")
    parser.add_argument("--draft-vocab", type=int, metavar="TOKENS", help="that drafts come from")
    parser.add_argument("--noise", type=float, default=60.0, help="in the weak head, by tensor")
    given = parser.parse_args()
    following = agreement_of(Path(given.model)).following.tolist()
    draw = random.Random(0)
    asked = [draw.choices(range(2, len(following)), k=given.prompt) for _ in range(given.requests)]
    vocabs: list[DraftVocab | None] = [None, None]
    if given.draft_vocab is not None:
        size, count = len(following), given.draft_vocab
        vocabs = [
            DraftVocab.of(ids, vocab_size=size)
            for ids in (range(2, 2 + count), range(size - count, size))
        ]
    engine = Engine(
        given.model, speculate=given.speculate, draft_weights=given.draft_weights,
        draft_vocab=None if vocabs[0] is None else [vocabs[0]],
        max_running_requests=given.requests, max_model_len=given.prompt + given.answer + 16,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        good = Path(folder) / "good"
        with mock.patch.object(os, "fsync"):
            plan_export(open_head(given.model), "headstart").write(good)
        weak = disturbed(good, Path(folder) / "weak", given.noise)
        both = [(weak, vocabs[1]), (good, vocabs[0])]
        heads = [both[number % 2] for number in range(given.swaps)]
        seeded: dict[int, list[int]] = {}
        for owner, name in WATCHED:
            PHASES.watch(owner, name).start()
        print("device", torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
        answered(engine, asked, following, given, [], seeded)  # captures what is not captured yet
        for name, swapped in (("without", []), ("with", heads), ("without", []), ("with", heads)):
            found = answered(engine, asked, following, given, swapped, seeded)
            print(json.dumps({"swaps": name, **found}), flush=True)


if __name__ == "__main__":
    main()
