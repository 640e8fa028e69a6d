"""What the engine's thread does for a round, on a device that gives tokens at once.

PYTHONPATH=. python3 benchmarks/host_rounds.py MODEL [--requests 8,128] [--kinds greedy,json]
    [--rounds 60] [--profile]

MODEL is a small calibrated checkpoint with a tokenizer (`headstart calibrate --tokenizer demo`).
Requests decode in device rounds whose device is a stub: every round drafts three tokens and emits
them, or those of a text that fits the grammar. With `json_any` and `tools_any` drafts are tokens at
random and one token that fits is emitted, as a calibrated checkpoint does, which knows nothing of
JSON; with `regex`, which permits any text, all drafts are right. Masks, log-probabilities, texts
and counters are the engine's own, prompts are one token.
Milliseconds of a step are processor time of all threads, median and mean; beside an H200 they are
hidden as long as they are less than a round takes. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grammar_rounds import cases
from torch import Tensor

from headstart.backends.base import GivenCopy, HeadStates, Launched, RoundRequest, RoundSizes
from headstart.backends.cuda.launched import LaunchedRound
from headstart.backends.cuda.mask_copies import MaskCopies
from headstart.backends.rounds import DeviceRounds, RoundMasks, SizeTimes
from headstart.backends.rows import TrunkOutput, TrunkRows
from headstart.engine.engine import Engine
from headstart.engine.rounds import Rounds
from headstart.sampling.masks import num_words
from headstart.sampling.params import Row, SamplingParams
from headstart.server.grammars.compiler import GrammarCompiler
from headstart.server.grammars.specs import GrammarSpec

DRAFTS = 3
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {}, "logprobs": {"logprobs": 0}, "logprobs5": {"logprobs": 5}, "json": {},
    "tools": {}, "json_any": {}, "tools_any": {}, "regex": {},
}  # fmt: skip
GRAMMARS = {"json": "JSON schema", "tools": "tools", "regex": "regex (.|\\n)*"}
ANY = "_any"  # the end of a kind whose texts are tokens at random that fit


class QuickRounds(DeviceRounds):
    """Requests follow texts: each the one that it was given, from its beginning, over and over."""

    launched = LaunchedRound  # what a round becomes

    def __init__(self, requests: int, vocab: int, text: Sequence[int], *, is_any: bool):
        self.sizes = RoundSizes(
            max_requests=requests, max_drafts=DRAFTS, num_drafts=DRAFTS, max_tokens=1 << 20
        )
        self.window, self._text = 16, list(text)
        self._places: list[int] = []
        self._tops: list[int | None] = []
        self._grammars: list[bool] = []
        size = requests * (DRAFTS + 1), num_words(vocab)
        masks = torch.zeros(size, dtype=torch.int32, device="meta")  # where writing costs nothing
        self._copies = MaskCopies(masks)
        draw = torch.Generator().manual_seed(0)
        rows = requests * (DRAFTS + 1)
        self._values = -torch.rand(rows, 21, generator=draw)
        self._ids = torch.randint(0, vocab, (rows, 20), generator=draw, dtype=torch.int32)
        self._waiting: tuple[LaunchedRound, list[list[int]]] | None = None
        self._draw = random.Random(0) if is_any else None
        self.seconds = 0.0  # for what a device would do

    def why_not(self, params: SamplingParams) -> str | None:
        return None

    def choose_first(self, logits: Tensor, rows: Sequence[Row]) -> tuple[list[Tensor], Launched]:
        first = torch.full((len(rows),), self._text[0])
        launched = LaunchedRound(tops=[row.params.logprobs for row in rows])
        launched.copy_out(torch.stack([torch.ones_like(first), first], 1), self._told(len(rows)))
        return list(first.unbind()), launched

    def _told(self, rows: int) -> tuple[Tensor, Tensor]:
        return self._values[:rows], self._ids[:rows]

    def admit(self, request: RoundRequest) -> None:
        self._places.append(1)
        self._tops.append(request.row.params.logprobs)
        self._grammars.append(request.has_grammar)

    def remove(self, index: int) -> None:
        self._places[index] = self._places[-1]
        self._tops[index] = self._tops[-1]
        self._grammars[index] = self._grammars[-1]
        del self._places[-1], self._tops[-1], self._grammars[-1]

    def extend(self, blocks: Mapping[int, tuple[int, Sequence[int]]]) -> None:
        pass

    def max_ahead(self, drafts: Sequence[int]) -> int:
        return 2 * (DRAFTS + 1) + 1

    def joins(self, rows: Sequence[TrunkRows]) -> bool:
        return False

    def fitting_rows(self, counts: Sequence[int]) -> int:
        return sum(counts)

    def give(self, copies: Mapping[int, GivenCopy], most: int, rows: int) -> None:
        pass

    def launch(self, drafts: Sequence[int], rows: Sequence[TrunkRows] = ()) -> Launched:
        started, following = time.thread_time(), []
        for index, at in enumerate(self._places):
            if self._draw is not None:
                following.append(self._draw.choices(range(10, 40000), k=DRAFTS + 1))
                continue
            own = [self._text[(at + i) % len(self._text)] for i in range(DRAFTS + 1)]
            self._places[index] = at + DRAFTS + 1
            following.append(own)
        launched = self.launched(list(self._tops), drafts=[DRAFTS] * len(drafts))
        self._waiting = launched, following
        if not any(self._grammars):
            self._end()
        self.seconds += time.thread_time() - started
        return launched

    def _end(self) -> None:
        assert self._waiting is not None
        (launched, made), self._waiting = self._waiting, None
        emitted = torch.tensor([[len(own), *own, *[0] * (DRAFTS + 1 - len(own))] for own in made])
        is_told = any(top is not None for top in self._tops)
        launched.copy_out(emitted, self._told(len(made) * (DRAFTS + 1)) if is_told else None)

    def read(self, rows: Sequence[TrunkRows]) -> TrunkOutput:
        raise AssertionError("rows do not join")

    def is_drafting(self) -> bool:
        return False

    def drafted(self) -> list[list[int]] | None:
        return None if self._waiting is None else [own[:DRAFTS] for own in self._waiting[1]]

    def mask_room(self, rows: int, words: int) -> np.ndarray:
        return self._copies.room(rows, words)

    def choose(self, masks: RoundMasks) -> None:
        if masks.requests:
            self._copies.copy(masks, DRAFTS + 1, count=self.sizes.max_requests)
        started = time.thread_time()
        if self._draw is not None and self._waiting is not None:
            own = self._waiting[1]
            for index, row in masks.ends.items():
                first = masks.requests.index(index) if masks.depths[row] else row
                words = masks.words[first].view(np.uint8)
                fitting = np.flatnonzero(np.unpackbits(words, bitorder="little"))
                own[index] = [int(self._draw.choice(fitting))]
        self._end()
        self.seconds += time.thread_time() - started

    def drain(self, lengths: Sequence[int]) -> list[HeadStates | None]:
        raise AssertionError("there is memory")

    def warm_up(self) -> None:
        pass

    def time_rounds(self) -> list[SizeTimes]:
        return []

    def time_passes(self) -> tuple[tuple[int, float], ...]:
        return ()

    def bucket(self, count: int) -> int:
        return count


def spec_of(kind: str) -> tuple[GrammarSpec, str] | None:
    """The grammar of a kind, and a text that fits it."""
    name = GRAMMARS.get(kind.removesuffix(ANY))
    return None if name is None else cases()[name]


def text_for(engine: Engine, kind: str) -> list[int]:
    """What requests of a kind are to write."""
    tokenizer, known = engine.prompts.tokenizer, spec_of(kind)
    if known is not None and kind != "regex":
        return list(tokenizer.encode(known[1], add_special_tokens=False))
    text = random.Random(0).choices(range(10, 40000), k=400)
    if kind != "regex":
        return text
    # That one permits whatever is whole characters.
    return [token for token in text if "\ufffd" not in tokenizer.decode([token])]


def measured(engine: Engine, kind: str, count: int, given: argparse.Namespace) -> dict[str, Any]:
    """Steps while all requests decode."""
    vocab, text, known = engine.model.config.vocab, text_for(engine, kind), spec_of(kind)
    spec = None if known is None else known[0]
    rounds = QuickRounds(count, vocab, text, is_any=kind.endswith(ANY))
    engine.loop.rounds = Rounds(rounds, engine.pool)
    gc.collect()
    gc.freeze()  # as in a server, where a pass over all objects is rare
    most = 1 + (given.rounds + 8) * (DRAFTS + 1)
    if spec is not None and kind != "regex":
        most = min(most, len(text) - DRAFTS)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=most, **KINDS[kind])
    for _ in range(count):
        grammar = given.compiler.compile(spec) if spec is not None else None
        engine.add([text[-1]], params, grammar=grammar)
    while len(engine.loop.rounds.requests) < count:
        engine.step()
    engine.step()
    profile, seconds = cProfile.Profile(time.process_time), []
    while engine.has_work:
        started = time.process_time() - rounds.seconds
        if given.profile:
            profile.enable()
        updates = engine.step()
        profile.disable()
        if len(engine.loop.rounds.requests) == count and not any(u.finish_reason for u in updates):
            seconds.append(time.process_time() - rounds.seconds - started)
    if given.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(28)
    row = {"kind": kind, "requests": count, "rounds": len(seconds)}
    mean, median = statistics.fmean(seconds), statistics.median(seconds)
    return {**row, "step_ms": round(1e3 * median, 3), "mean_ms": round(1e3 * mean, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", default="8,128")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    counts = [int(number) for number in given.requests.split(",")]
    torch.set_num_threads(1)  # threads that wait for the next product count as work
    engine = Engine(
        given.model, speculate=0, max_running_requests=max(counts), device="cpu",
        kv_bytes=1 << 28, prefix_caching=False, kernels="off",
    )  # fmt: skip
    tokenizer = engine.prompts.tokenizer
    given.compiler = GrammarCompiler(
        tokenizer, engine.model.config.vocab, end_ids=[tokenizer.eos_token_id], max_seconds=60
    )
    found = []
    for count in counts:
        for kind in given.kinds.split(","):
            found.append(measured(engine, kind, count, given))
            print(json.dumps(found[-1]), flush=True)
    given.compiler.close()
    print(json.dumps({"rows": found}))


if __name__ == "__main__":
    main()
