"""Rounds, first tokens and long prompts of one engine on a GPU; what hides the host on and off.

PYTHONPATH=. python3 benchmarks/gpu_requests.py MODEL [--parts rounds,long,burst,prefix,kernels]
    [--requests 8,32,128] [--seconds 150] [--out FILE]

MODEL is a calibrated checkpoint with a tokenizer. Parts:
- rounds: requests of one length decode together, greedy, with log-probabilities, held to a JSON
  schema, calling tools: milliseconds of a step in which nothing else happens, of greedy's.
- long: eight prompts at once, each of several passes, and one alone: seconds to each first token,
  then milliseconds of a round. `cut 1` reads prompts as they come, `cut 2048` at fixed places.
- burst: many prompts of mixed lengths at once, greedy and held to a schema: first tokens. `late`
  makes masks when drafts have come, and reads prompts behind them.
- prefix: eight requests at once whose beginning is cached: first tokens.
- kernels: what the choice of tokens takes the device with log-probabilities and without.
On and off take turns in one process. --seconds: no part begins later. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import torch
from grammar_rounds import cases
from over_http.load import Sizes, lengths

from headstart.calibrate.calibrated import agreement_of
from headstart.engine import scheduler
from headstart.engine.engine import Engine
from headstart.engine.rounds import Rounds
from headstart.errors import MissingExtra
from headstart.sampling.params import SamplingParams
from headstart.server.grammars.compiler import GrammarCompiler

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {}, "logprobs": {"logprobs": 0}, "json": {}, "tools": {}, "regex": {},
}  # fmt: skip
GRAMMARS = {"json": "JSON schema", "tools": "tools", "regex": "regex (.|\\n)*"}
SAMPLING = ("_adjust", "_draw", "_finish", "_weigh", "_rank", "_remember", "_best_of_logits")


@contextmanager
def late() -> Iterator[None]:
    """Masks begin when drafts have come, and prompts are read behind the choice."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(Rounds, "begin_masks", lambda *_: None))
        stack.enter_context(patch.object(Rounds, "is_waiting", PropertyMock(return_value=False)))
        yield


@contextmanager
def as_they_come() -> Iterator[None]:
    with patch.object(scheduler, "_CUT", 1):
        yield


@contextmanager
def as_is() -> Iterator[None]:
    yield


class Rig:
    """One engine and what is asked of it."""

    def __init__(self, given: argparse.Namespace):
        self.given, self.rows = given, list[dict[str, Any]]()
        self.counts = [int(number) for number in given.requests.split(",")]
        began = time.perf_counter()
        self.engine = Engine(
            str(given.model), speculate=3, max_running_requests=max(*self.counts, 8),
            max_model_len=given.long + 1000, prefix_caching=True, **given.options,
        )  # fmt: skip
        self.began = time.perf_counter()
        self.compiler = self._compiler()
        self.kinds = [kind for kind in KINDS if kind not in GRAMMARS or self.compiler is not None]
        self.tokens = range(10, len(agreement_of(given.model).following) - 10)
        self._draw = random.Random(time.time_ns())  # no prompt is found in the prefix cache
        self.note({"part": "start", "seconds": round(self.began - began, 1)})

    def _compiler(self) -> GrammarCompiler | None:
        """None where xgrammar is missing; kinds with grammars are left out then."""
        tokenizer, vocab = self.engine.prompts.tokenizer, self.engine.model.config.vocab
        try:
            return GrammarCompiler(
                tokenizer, vocab, end_ids=[tokenizer.eos_token_id], max_seconds=60
            )
        except MissingExtra as error:
            print(f"without grammars: {error}", flush=True)
            return None

    def note(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        if self.given.out:
            self.given.out.write_text(json.dumps(self.rows, indent=1) + "\n")

    def prompt(self, length: int) -> list[int]:
        return self._draw.choices(self.tokens, k=length)

    def add(self, prompt: list[int], kind: str, answer: int) -> str:
        grammar = None
        if kind in GRAMMARS and self.compiler is not None:
            grammar = self.compiler.compile(cases()[GRAMMARS[kind]][0])
        more = {**KINDS[kind], "ignore_eos": kind not in ("json", "tools")}
        params = SamplingParams(temperature=0, max_tokens=answer, **more)
        return self.engine.add(prompt, params, grammar=grammar)

    def play(self) -> tuple[list[float], list[float], float]:
        """All first tokens in order, seconds of steps in which all only decode, tokens of a step.

        Until the first request has ended, when the rest is given up.
        """
        loop, first, quiet, tokens = self.engine.loop, dict[str, float](), [], []
        began = last = time.perf_counter()
        running = len(self.engine.scheduler.waiting)
        is_ended = False
        while not is_ended:
            updates = self.engine.step()
            now = time.perf_counter()
            for update in updates:
                first.setdefault(update.request_id, now - began)
                is_ended |= update.finish_reason is not None
            rounds = loop.rounds
            if rounds is not None and len(rounds.requests) == running and not is_ended:
                quiet.append(now - last)
                tokens.append(sum(len(update.token_ids) for update in updates))
            last = now
        left = self.engine.scheduler.running + self.engine.scheduler.waiting
        for name in [request.group for request in left]:
            self.engine.abort(name)
        mean = statistics.fmean(tokens[2:]) / running if len(tokens) > 2 else 0.0
        return sorted(first.values()), quiet[2:], mean

    @property
    def is_late(self) -> bool:
        return bool(time.perf_counter() - self.began > self.given.seconds)


def rounds(rig: Rig) -> None:
    for count in reversed(rig.counts):
        greedy = 0.0
        for turn in range(2):  # the first compiles and captures
            for kind in rig.kinds:
                for name, way in (("", as_is), ("late", late)):
                    if rig.is_late or (name and (kind not in GRAMMARS or not turn)):
                        continue
                    answer = rig.given.rounds * (3 if kind not in GRAMMARS else 2)
                    for _ in range(count):
                        rig.add(rig.prompt(rig.given.prompt), kind, answer if turn else 24)
                    with way():
                        _, seconds, tokens = rig.play()
                    if not turn or not seconds:
                        continue
                    mean = 1e3 * statistics.fmean(seconds)
                    greedy = mean if kind == "greedy" else greedy
                    rig.note({
                        "part": "rounds", "requests": count, "kind": kind, "way": name or "now",
                        "mean_ms": round(mean, 3), "of_greedy": round(mean / greedy, 3),
                        "median_ms": round(1e3 * statistics.median(seconds), 3),
                        "p90_ms": round(1e3 * sorted(seconds)[int(0.9 * len(seconds))], 3),
                        "steps": len(seconds), "tokens_per_round": round(tokens, 2),
                    })  # fmt: skip


def long(rig: Rig) -> None:
    plays = [("cut 2048", as_is, 1), ("cut 1", as_they_come, 8), ("cut 2048", as_is, 8),
             ("cut 1", as_they_come, 8), ("cut 2048", as_is, 8)]  # fmt: skip
    for name, way, count in plays:
        if rig.is_late:
            return
        for _ in range(count):
            rig.add(rig.prompt(rig.given.long), "greedy", 240 if count > 1 else 96)
        with way():
            first, seconds, _ = rig.play()
        rig.note({
            "part": "long", "way": name, "requests": count,
            "first_s": [round(value, 3) for value in first],
            "round_ms": round(1e3 * statistics.fmean(seconds), 2) if seconds else None,
        })  # fmt: skip


def burst(rig: Rig) -> None:
    count = max(rig.counts)
    for turn in range(2):
        for kind, name, way in (
            ("greedy", "now", as_is), ("json", "late", late), ("json", "now", as_is)
        ):  # fmt: skip
            if rig.is_late or kind not in rig.kinds:
                continue
            for prompt, _ in lengths(count, f"burst {turn}", Sizes(most_prompt=rig.given.long)):
                rig.add(rig.prompt(prompt), kind, 90)
            with way():
                first, _, _ = rig.play()
            rig.note({
                "part": "burst", "turn": turn, "kind": kind, "way": name, "came": len(first),
                "first_p50_ms": round(1e3 * first[len(first) // 2], 1),
                "first_last_ms": round(1e3 * first[-1], 1),
            })  # fmt: skip


def prefix(rig: Rig) -> None:
    shared = rig.prompt(rig.given.shared)
    for turn in range(4):
        if rig.is_late:
            return
        for _ in range(8 if turn else 1):
            rig.add(shared + rig.prompt(100), "greedy", 64)
        first, _, _ = rig.play()
        rig.note({"part": "prefix", "turn": turn, "first_ms": [round(1e3 * t, 1) for t in first]})


def kernels(rig: Rig) -> None:
    """Of 12 steps of all requests, profiled."""
    from torch.profiler import ProfilerActivity, profile

    count = max(rig.counts)
    for kind in ("greedy", "logprobs"):
        if rig.is_late or not torch.cuda.is_available():
            return
        for _ in range(count):
            rig.add(rig.prompt(rig.given.prompt), kind, 120)
        in_rounds = rig.engine.loop.rounds
        while in_rounds is not None and len(in_rounds.requests) < count:
            rig.engine.step()
        recorder = profile(activities=[ProfilerActivity.CUDA])
        with recorder:
            for _ in range(12):
                rig.engine.step()
            torch.cuda.synchronize()
        rig.play()
        events = recorder.key_averages()
        own = {
            event.key: round(event.self_device_time_total / 12e3, 4)
            for event in events if event.key.startswith(SAMPLING)
        }  # fmt: skip
        total = sum(event.self_device_time_total for event in events) / 12e3
        rig.note({"part": "kernels", "kind": kind, "ms_a_step": round(total, 3), "choice": own})


PARTS = {f.__name__: f for f in (long, rounds, burst, kernels, prefix)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--requests", default="8,32,128")
    parser.add_argument("--rounds", type=int, default=60, help="of a request, about")
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--long", type=int, default=24000)
    parser.add_argument("--shared", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--smoke", action="store_true", help="on a CPU, to try the program")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.options = {"device": "cpu", "kernels": "off", "kv_bytes": 1 << 26} if given.smoke else {}
    rig = Rig(given)
    for name in given.parts.split(","):
        PARTS[name](rig)
    if rig.compiler is not None:
        rig.compiler.close()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(json.dumps({"gpu": gpu, "torch": torch.__version__, "rows": rig.rows}))


if __name__ == "__main__":
    main()
