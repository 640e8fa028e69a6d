"""Where the seconds of many requests go on a GPU: prompts, rounds, gaps; and a round's kernels.

PYTHONPATH=. python3 benchmarks/gpu_timeline.py MODEL [--requests 80] [--speculate 3]
    [--prompt 2500] [--answer 1500] [--profile-at 230] [--mixed 1000 | --prefix 512] [--apart]

MODEL is a calibrated checkpoint. All requests come at once, or with --mixed so many in all, of
which --requests are under way at any time, with the lengths of benchmarks/gpu_http.py: what its
servers do, without HTTP; with --prefix so many whose first 2000 tokens are the same. --apart keeps
prompts out of the passes of rounds, --many-rows 2000,4096 plays once for each number of rows of
prompts from which on they are read in passes of their own. The device's own events
stand before and after each pass over prompts and each round, so the figures are of a run as it is,
unlike those of benchmarks/gpu_round.py, which repeats one round. Then the same again, with the
profiler over 30 rounds from step --profile-at on (0: not at all). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from over_http.load import Sizes, lengths

from headstart.backends.base import Launched, TrunkRows
from headstart.backends.cuda import device_rounds
from headstart.backends.cuda.backend import CudaBackend
from headstart.backends.cuda.device_rounds import CapturedRounds
from headstart.calibrate.calibrated import agreement_of
from headstart.engine.engine import Engine
from headstart.engine.loop import Loop
from headstart.sampling.params import SamplingParams

PROFILED_ROUNDS = 30
_SHOWN = 24


class Timeline:
    """Events around what the loop gives the device, in its order."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, Any, Any]] = []
        self._pass_began: Any = None  # in this step

    def watch(self) -> None:
        launch, trunk_pass, step = CapturedRounds.launch, CudaBackend.trunk_pass, Loop.step

        def timed_launch(
            rounds: CapturedRounds, drafts: Sequence[int], rows: Sequence[TrunkRows] = ()
        ) -> Launched:
            before, size = _mark(), rounds.bucket(len(drafts))
            launched = launch(rounds, drafts, rows)
            kind = f"rounds of {size}, joined" if rows else f"rounds of {size}"
            self.parts.append((kind, before, _mark()))
            return launched

        def watched_pass(backend: CudaBackend, requests: Any) -> Any:
            self._pass_began = _mark()
            return trunk_pass(backend, requests)

        def timed_step(loop: Loop) -> Any:
            self._pass_began = None
            updates = step(loop)
            if self._pass_began is not None:
                self.parts.append(("prompts", self._pass_began, _mark()))
            return updates

        patch.object(CapturedRounds, "launch", timed_launch).start()
        patch.object(CudaBackend, "trunk_pass", watched_pass).start()
        patch.object(Loop, "step", timed_step).start()

    def summary(self) -> dict[str, Any]:
        """Milliseconds and how many, by kind, and what lies between them."""
        torch.cuda.synchronize()
        sums: dict[str, list[float]] = defaultdict(list)
        for kind, before, after in self.parts:
            sums[kind].append(before.elapsed_time(after))
        pairs = zip(self.parts, self.parts[1:], strict=False)
        gaps = sum(max(0.0, first[2].elapsed_time(second[1])) for first, second in pairs)
        kinds = {
            kind: {"count": len(times), "ms": round(sum(times), 1),
                   "median_ms": round(sorted(times)[len(times) // 2], 2)}
            for kind, times in sums.items()
        }  # fmt: skip
        return {"kinds": kinds, "gaps_ms": round(gaps, 1)}


def _mark() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def play(engine: Engine, given: argparse.Namespace, answer: int, seed: int) -> float:
    """Seconds until all requests have been answered."""
    draw = random.Random(seed)
    if given.mixed or given.prefix:
        return play_under_way(engine, given, draw)
    asked = [draw.choices(given.tokens, k=given.prompt) for _ in range(given.requests)]
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    began = time.perf_counter()
    engine.generate(asked, params)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def play_under_way(engine: Engine, given: argparse.Namespace, draw: random.Random) -> float:
    """The same for requests of many lengths, or with one beginning; some are always under way."""
    waiting = with_one_beginning(given, draw) if given.prefix else of_many_lengths(given, draw)
    began, open_requests = time.perf_counter(), 0
    given.first_tokens = []
    while waiting or open_requests:
        while waiting and open_requests < given.requests:
            ids, answer = waiting.pop()
            engine.add(ids, SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True))
            open_requests += 1
        for update in engine.step():
            if update.finish_reason is not None:
                open_requests -= 1
                stats = engine.collect(update.request_id).outputs[0].stats
                given.first_tokens.append(1e3 * (stats.first_token_seconds or 0.0))
    torch.cuda.synchronize()
    return time.perf_counter() - began


def of_many_lengths(given: argparse.Namespace, draw: random.Random) -> list[tuple[list[int], int]]:
    pairs = lengths(given.mixed, f"{given.requests} 0", Sizes())
    return [(draw.choices(given.tokens, k=prompt), answer) for prompt, answer in pairs]


def with_one_beginning(
    given: argparse.Namespace, draw: random.Random
) -> list[tuple[list[int], int]]:
    sizes = Sizes()
    shared = random.Random(0).choices(given.tokens, k=sizes.shared)
    return [
        (shared + draw.choices(given.tokens, k=sizes.own), sizes.prefix_answer)
        for _ in range(given.prefix)
    ]


def profiled(engine: Engine, given: argparse.Namespace) -> dict[str, Any]:
    """Some rounds in the middle of a run: kernels by round, and the share of time they take."""
    from torch.profiler import ProfilerActivity, profile

    recorder, count, step = profile(activities=[ProfilerActivity.CUDA]), 0, Loop.step
    began = ended = 0.0

    def watched(loop: Loop) -> Any:
        nonlocal count, began, ended
        count += 1
        if count == given.profile_at:
            torch.cuda.synchronize()
            recorder.start()
            began = time.perf_counter()
        updates = step(loop)
        if count == given.profile_at + PROFILED_ROUNDS - 1:
            torch.cuda.synchronize()
            ended = time.perf_counter()
            recorder.stop()
        return updates

    with patch.object(Loop, "step", watched):
        play(engine, given, given.answer, seed=5)
    events = sorted(recorder.key_averages(), key=lambda e: -e.self_device_time_total)
    busy = sum(event.self_device_time_total for event in events) / 1e6
    kernels = [
        {"kernel": event.key[:80], "launches": round(event.count / PROFILED_ROUNDS, 1),
         "ms": round(event.self_device_time_total / 1e3 / PROFILED_ROUNDS, 3)}
        for event in events[:_SHOWN] if event.self_device_time_total > 0
    ]  # fmt: skip
    return {"busy_share": round(busy / (ended - began), 3), "kernels": kernels}


def timed_play(
    engine: Engine, given: argparse.Namespace, timeline: Timeline, seed: int
) -> dict[str, Any]:
    """One play, and where its time went."""
    timeline.parts.clear()
    engine.stats.clear()
    seconds = play(engine, given, given.answer, seed)
    found = timeline.summary()
    found |= {"seconds": round(seconds, 3), "speculate": given.speculate,
              "tokens_per_second": round(engine.stats.output_tokens / seconds),
              "prompt_tokens": engine.stats.prompt_tokens,
              "many_prompt_rows": device_rounds.MANY_PROMPT_ROWS}  # fmt: skip
    if firsts := sorted(given.first_tokens):
        found["first_token_ms"] = {
            f"p{share}": round(firsts[len(firsts) * share // 100], 1) for share in (50, 90, 99)
        }
    for kind, row in found["kinds"].items():
        print(f"{kind:24} {row['count']:5} x {row['median_ms']:8} ms, {row['ms']:9} ms in all")
    print(f"between them {found['gaps_ms']} ms; {found['tokens_per_second']} tokens/s; from "
          f"{found['many_prompt_rows']} rows apart; {found.get('first_token_ms')}",
          flush=True)  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--speculate", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=2500)
    parser.add_argument("--answer", type=int, default=1500)
    parser.add_argument("--profile-at", type=int, default=230)
    parser.add_argument("--apart", action="store_true", help="prompts join no round")
    parser.add_argument("--mixed", type=int, default=0, help="requests of many lengths in all")
    parser.add_argument("--prefix", type=int, default=0, help="requests that begin alike in all")
    parser.add_argument("--many-rows", default=str(device_rounds.MANY_PROMPT_ROWS))
    given = parser.parse_args()
    given.first_tokens = []
    given.tokens = range(2, len(agreement_of(Path(given.model)).following))
    timeline = Timeline()
    timeline.watch()
    engine = Engine(
        given.model, speculate=given.speculate, max_running_requests=given.requests,
        prefix_caching=bool(given.prefix),
        max_model_len=max(given.prompt + given.answer, 4000 * bool(given.mixed)) + 64,
    )  # fmt: skip
    rounds = engine.loop.rounds._device if engine.loop.rounds is not None else None
    if given.apart and isinstance(rounds, CapturedRounds):
        rounds.joins_prompts = False
    play(engine, given, 20, seed=99)
    for seed, many in enumerate(map(int, given.many_rows.split(","))):
        device_rounds.MANY_PROMPT_ROWS = many
        found = timed_play(engine, given, timeline, seed)
    if given.profile_at:
        found |= profiled(engine, given)
        print(f"kernels run {found['busy_share']:.1%} of the time")
        for row in found["kernels"]:
            print(f"  {row['ms']:8} ms in a round {row['launches']:6} x {row['kernel']}")
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, **found}))


if __name__ == "__main__":
    main()
