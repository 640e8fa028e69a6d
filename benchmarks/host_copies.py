"""What the engine's thread does for rounds in which requests copy, and whether a device waits.

PYTHONPATH=. python3 benchmarks/host_copies.py MODEL --passes FILE [--requests 64] [--share 0.5]
    [--length 64] [--plays 8] [--profile]

MODEL is a small checkpoint: `headstart calibrate --active 32 --acceptance 0.45 --shape
layers=1,hidden=64,intermediate=16,heads=1,kv_heads=1,vocab=32768`. Prompts hold that share of the
answers in spans of that length, as in benchmarks/gpu_copies.py, of which FILE is a result: how long
passes take, by rows. Rounds run on a stub: drafts of the head are right at a rate, copies are taken
up and cut as the kernels do it, answers are what they are known to be. A round's time on a device
is computed from those passes and rough sizes of the rest, and `auto` decides by the same.

Shown by side (`auto`, or the head alone): what a step takes the engine's thread, in processor time
without the stub's (median and mean), and what finding copies does; seconds that the device waits
for the host between rounds; seconds of the play by the device's clock. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from host_rounds import QuickRounds
from stub_device import LAUNCH, Clock, DeviceTimes, StubRound

from headstart.backends.base import GivenCopy, Launched, RoundRequest, RoundSizes
from headstart.backends.cuda.decode_batch import DecodeBatch
from headstart.backends.cuda.launched import LaunchedRound
from headstart.backends.cuda.packed import captured_rows, most_captured
from headstart.backends.cuda.round_plans import COPIED
from headstart.backends.rows import TrunkRows
from headstart.calibrate.copy_prompts import CopyPlan
from headstart.engine.core import _keep_pauses_short
from headstart.engine.engine import Engine
from headstart.engine.options import MAX_DRAFTS, MENU
from headstart.engine.rounds import Rounds
from headstart.sampling.params import Row, SamplingParams

GPU = torch.device("cuda")


@dataclass
class Text:
    """Of a request on the device: all that it will have, and how far it is."""

    tokens: list[int]
    length: int
    end: int
    newest: int = 1  # tokens that the last round gave

    def num_right(self, drafts: Sequence[int]) -> int:
        for right, draft in enumerate(drafts):
            if draft != self.tokens[self.length + right]:
                return right
        return len(drafts)


Made = tuple[list[int], int]  # drafts of a request, and how many of them are the head's


class CopyingRounds(QuickRounds):
    """Requests write texts that are known; drafts are the head's, or copies that were given."""

    def __init__(self, engine: Engine, texts: Iterator[list[int]], rate: float, times: DeviceTimes):
        requests = engine.options.num_requests
        super().__init__(requests, engine.model.config.vocab, [1], is_any=False)
        self.sizes = RoundSizes(
            max_requests=requests, max_drafts=MAX_DRAFTS, num_drafts=engine.options.max_drafts,
            max_tokens=1 << 20, copied=MAX_DRAFTS, menu=MENU,
        )  # fmt: skip
        self.max_rows = most_captured(requests * (self.sizes.num_drafts + 1), GPU)
        self.clock, self.rounds, self.rows = Clock(), 0, 0
        self._coming, self._rate, self._times = texts, rate, times
        self._entering: list[list[int]] = []
        self._texts: list[Text] = []  # by index
        self._given: Mapping[int, GivenCopy] = {}
        self._copied = self._copied_rows = 0
        self._last = 0  # drafts of a request in the last round, at most
        self._batch = DecodeBatch(
            requests, max_drafts=MAX_DRAFTS, window=MAX_DRAFTS + 1, max_blocks=1, hidden=1,
            vocab=32, dtype=torch.float32, device=torch.device("cpu"), copied=MAX_DRAFTS,
        )  # fmt: skip

    def choose_first(
        self, logits: torch.Tensor, rows: Sequence[Row]
    ) -> tuple[list[torch.Tensor], Launched]:
        texts = [next(self._coming) for _ in rows]
        self._entering += texts
        first = torch.tensor([text[row.position] for text, row in zip(texts, rows, strict=True)])
        launched = LaunchedRound(tops=[None] * len(rows))
        launched.copy_out(torch.stack([torch.ones_like(first), first], 1))
        return list(first.unbind()), launched

    def admit(self, request: RoundRequest) -> None:
        end = request.num_tokens + request.remaining
        self._texts.append(Text(self._entering.pop(0), request.num_tokens, end))

    def remove(self, index: int) -> None:
        self._texts[index] = self._texts[-1]
        del self._texts[-1]

    def max_ahead(self, drafts: Sequence[int]) -> int:
        return (self._last + 1) + (max(*drafts, self._copied) + 1) + 1

    def give(self, copies: Mapping[int, GivenCopy], most: int, rows: int) -> None:
        if not copies and not self._copied:
            return
        self._batch.give(copies)
        sizes = (size for size in (*MENU, *COPIED) if size >= most)
        self._copied, self._given = next(sizes) if copies else 0, dict(copies)
        self._copied_rows = rows

    def launch(self, drafts: Sequence[int], rows: Sequence[TrunkRows] = ()) -> Launched:
        began, started = self.clock.now(), time.thread_time()
        texts, own, most = self._texts, len(self._texts) * (max(drafts) + 1), max(drafts)
        room = own
        if self._copied > most:
            room = min(captured_rows(own + self._copied_rows, GPU), self.max_rows)
        made = [self._drafted(index, limit) for index, limit in enumerate(drafts)]
        made = fitting(made, room)
        emitted = torch.zeros(len(texts), MAX_DRAFTS + 2, dtype=torch.int64)
        for index, (text, (own_drafts, _)) in enumerate(zip(texts, made, strict=True)):
            until = min(text.length + text.num_right(own_drafts) + 1, text.end)
            new = text.tokens[text.length : until]
            emitted[index, : 1 + len(new)] = torch.tensor([len(new), *new])
            text.length, text.newest = until, len(new)
        late = self._last + 1 if self._last > most else 0
        context = sum(text.length for text in texts)
        took = self._times.a_round(len(texts), most, context, more=room - own, late=late)
        launched = StubRound([None] * len(texts), list(drafts), self._last + 1, clock=self.clock)
        launched.copy_out(emitted, made=torch.tensor([[len(d), head] for d, head in made]).T)
        launched.ends = self.clock.run(began + LAUNCH / 1e3, took)
        self._last = max(most, self._copied)
        self.rounds, self.rows = self.rounds + 1, self.rows + room - own
        self.clock.stub += time.thread_time() - started
        self.clock.waited += LAUNCH / 1e3
        return launched

    def _drafted(self, index: int, limit: int) -> Made:
        text, copy = self._texts[index], self._given.get(index) if self._copied else None
        coming = text.tokens[text.length : text.length + limit]
        head = [t if random.Random(t).random() < self._rate else -2 for t in coming]
        behind = -1 if copy is None else text.length - copy.start
        if copy is None or not 0 <= behind <= min(text.newest, len(copy.tokens) - 1):
            return head, limit
        if list(copy.tokens[:behind]) != text.tokens[copy.start : text.length]:
            return head, limit
        own = list(copy.tokens[behind : behind + max(self._copied, limit)])
        agreed = limit if len(own) > limit and own[:limit] == head else 0
        return (own, agreed) if not copy.confirmed or agreed else (head, limit)


def fitting(made: list[Made], rows: int) -> list[Made]:
    """The same, cut alike to what a pass of so many rows has room for; the first have one more."""
    most = MAX_DRAFTS
    while sum(min(len(drafts), most) + 1 for drafts, _ in made) > rows:
        most -= 1
    spare = rows - sum(min(len(drafts), most) + 1 for drafts, _ in made)
    cut: list[Made] = []
    for drafts, head in made:
        more = int(len(drafts) > most and spare > 0)
        spare -= more
        cut.append((drafts[: most + more], head))
    return cut


def prompts_of(plan: CopyPlan, vocab: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and answers, as `copy_prompts` makes them from the cycle of a checkpoint."""
    numbers, found = random.Random(seed), []
    for _ in range(plan.prompts):
        first, *ids = numbers.sample(range(10, vocab - 10), 2 * plan.answer_tokens + 1)
        answer, other = ids[: plan.answer_tokens], ids[plan.answer_tokens :]
        spans = [answer[start : start + plan.length] for start in plan.starts]
        numbers.shuffle(spans)
        prompt = [token for span in spans for token in span] or other[: plan.answer_tokens // 2]
        found.append(([*prompt, first], answer))
    return found


def play(
    engine: Engine, given: argparse.Namespace, side: Literal["auto", "head"], seed: int
) -> dict[str, Any]:
    """All requests at once, until the last one ends."""
    count, policy, sources = given.requests, engine.policy, engine.loop.sources
    assert policy is not None and sources is not None
    plan = CopyPlan(
        length=given.length, share=given.share, prompts=count, answer_tokens=given.tokens
    )
    pairs = prompts_of(plan, engine.model.config.vocab, seed)
    times = DeviceTimes(dict(json.loads(given.passes.read_text())["pass_milliseconds"]))
    texts = ([*prompt, *answer, *[0] * (MAX_DRAFTS + 1)] for prompt, answer in pairs)
    rounds = CopyingRounds(engine, texts, given.rate, times)
    engine.loop.rounds = Rounds(rounds, engine.pool)
    policy.use_rounds(times.table(count, rounds.max_rows), lambda requests: count)
    params = SamplingParams(
        temperature=0, ignore_eos=True, max_tokens=given.tokens, draft_from=side, detokenize=False
    )
    names = [engine.add(prompt, params) for prompt, _ in pairs]
    while len(engine.loop.rounds.requests) < count:
        engine.step()
    clock, copied, finding = rounds.clock, engine.stats.copied_accepted, sources.copy_seconds
    began, idle, rounds.rounds, rounds.rows = clock.now(), clock.idle, 0, 0
    profile, seconds = cProfile.Profile(time.thread_time), list[float]()
    while engine.has_work:
        started = time.thread_time() - clock.stub
        if given.profile:
            profile.enable()
        engine.step()
        profile.disable()
        seconds.append(time.thread_time() - clock.stub - started)
    for name, (_, answer) in zip(names, pairs, strict=True):
        assert engine.collect(name).outputs[0].token_ids == answer
    if given.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    return {
        "side": side, "rounds": rounds.rounds,
        "step_ms": 1e3 * statistics.median(seconds), "mean_ms": 1e3 * statistics.fmean(seconds),
        "find_us": 1e6 * (sources.copy_seconds - finding) / rounds.rounds,
        "copied_rows": rounds.rows / rounds.rounds,
        "copied": (engine.stats.copied_accepted - copied) / (count * given.tokens),
        "device_waits_s": clock.idle - idle, "device_s": clock.free - began,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--passes", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.45)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--plays", type=int, default=8)
    parser.add_argument("--sides", default="auto,head")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for the next product count as work
    engine = Engine(
        given.model, speculate="auto", max_running_requests=given.requests, device="cpu",
        kv_bytes=1 << 27, prefix_caching=False, kernels="off", max_model_len=4 * given.tokens,
    )  # fmt: skip
    _keep_pauses_short(engine.loop)  # as on a GPU
    found = []
    for turn in range(given.plays):
        for side in given.sides.split(","):
            found.append(play(engine, given, side, turn))
            print(json.dumps(found[-1]), flush=True)
    print(json.dumps({"rows": found}))


if __name__ == "__main__":
    main()
