"""`auto` against every fixed K, and against an engine without a head, on one GPU.

PYTHONPATH=. python3 benchmarks/gpu_auto.py MODEL [--rates 0.2,0.5,0.8] [--out FILE]

MODEL is a calibrated checkpoint. Checkpoints that differ only in their rate differ only in their
embedding, so all rates are measured with one engine whose embedding is exchanged between them.
That engine runs `speculate="auto"`; requests ask for `auto` or for a fixed K. A second engine of
the same process has no head (`speculate=0`). What does not draft is the same text at every rate
and is measured once, with the first. All rounds are captured before anything is timed.

All answer the same prompts in turns, `auto` first. Fixed K rises until it is clearly slower
than the best; what is close to the best is played again with other prompts, unless plays take long.
How often drafts are right differs from text to text, most with one request, so ratios are those of
the time for the texts that both have answered. Where `auto` misses the goal, it and whom it lost to
are played up to five times in all.
A part is measured with `--rates` and `--requests`; the time it will take is said first. Output
tokens per second with prefill included; every answer is checked against the cycle that the trunk
walks. Results are written after every row; prints a table, the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import harmonic_mean as mean  # of speeds over texts of one length
from typing import Any

from auto_engines import AUTO, NO_HEAD, EnginePair, Played

Speeds = dict[int, float]  # tokens per second, by the seed of prompts
PLAIN = "0"
MOST_PLAYS = 5  # of contenders between whom the goal is missed
# Seconds of a contest by requests, and of everything before the first, on an H200 with a 7.8B
# model, 512 and 256 tokens, 2026-11-16, in a run where goals were missed; else a fifth less.
CONTEST_SECONDS = {1: 13.0, 4: 10.0, 16: 12.0, 80: 16.0, 256: 41.0}
START_SECONDS = 60.0
CLEARLY_SLOWER = 0.93  # of the best: more drafts will not be faster
CLOSE = 0.95  # of the best: which of them is faster is not certain yet
WARM_PROMPT, WARM_ANSWER = 16, 24  # tokens: enough for `auto` to see what drafts are worth
GOAL = 0.97  # of the best fixed K, and of an engine without a head


@dataclass
class Contest:
    """All contenders with one rate and one number of requests."""

    pair: EnginePair
    given: argparse.Namespace
    count: int
    known: dict[str, Speeds]  # of what was measured with another rate
    speeds: dict[str, Speeds] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # played so far
    plays: list[dict[str, Any]] = field(default_factory=list)
    auto: Played | None = None
    first_right: float | None = None

    def run(self) -> dict[str, Any]:
        self._first()
        for repeat in range(1, self.given.repeats):
            close = min(map(self._ratio, self._fixed())) / CLOSE
            again = [
                name for name in self.speeds
                if name not in self.known and self.seconds[name] < self.given.seconds
                and (name in (AUTO, NO_HEAD) or self._ratio(name) <= close)
            ]  # fmt: skip
            for name in again[:: -1 if repeat % 2 else 1]:
                self._play(name, repeat)
        while turns := self._missed():
            for name, seed in turns:
                self._play(name, seed)
        best = min(self._fixed(), key=self._ratio)
        assert self.auto is not None
        return {
            "requests": self.count,
            "tokens_per_second": {n: mean([*own.values()]) for n, own in self.speeds.items()},
            "all": self.speeds, "best_fixed": best, "auto_to_best": self._ratio(best),
            "auto_to_no_head": self._ratio(NO_HEAD),
            "zero_to_no_head": self._ratio(NO_HEAD, PLAIN) if PLAIN in self.speeds else None,
            "auto_chose": self.auto.chosen, "first_drafts_right": self.first_right,
            "plays": self.plays,
        }  # fmt: skip

    def _fixed(self) -> list[str]:
        return [name for name in self.speeds if name not in (AUTO, NO_HEAD)]

    def _ratio(self, name: str, of: str = AUTO) -> float:
        """Speed `of` one over that of `name`, for the texts that both have answered."""
        one, other = self.speeds[of], self.speeds[name]
        both = one.keys() & other.keys()
        return mean([one[seed] for seed in both]) / mean([other[seed] for seed in both])

    def _missed(self) -> list[tuple[str, int]]:
        """Which engines play which texts again: `auto` and the one it lost to, if not certainly."""
        auto = self.speeds[AUTO]
        better = [name for name in self.speeds if name != AUTO and self._ratio(name) < GOAL]
        behind = [(n, seed) for n in better for seed in auto if seed not in self.speeds[n]]
        if behind or not better or len(auto) >= MOST_PLAYS:
            return behind
        return [(name, len(auto)) for name in (AUTO, *better)]

    def _first(self) -> None:
        """Every contender once, fixed numbers as far as they may still be the best."""
        self._warm(AUTO)
        self._play(AUTO, 0)
        self._once(NO_HEAD)
        best = 0.0
        for drafts in map(str, self.given.fixed):
            self._once(drafts)
            speed = self.speeds[drafts][0]
            best = max(best, speed)
            if speed < CLEARLY_SLOWER * best:
                return

    def _once(self, name: str) -> None:
        if name in self.known:
            self.speeds[name] = self.known[name]
            return
        self._warm(name)
        self._play(name, 0)

    def _warm(self, name: str) -> None:
        answer = min(WARM_ANSWER, self.given.answer)
        self.pair.answer(name, self.count, prompt=WARM_PROMPT, answer=answer, seed=999)

    def _play(self, name: str, seed: int) -> None:
        sizes = {"prompt": self.given.prompt, "answer": self.given.answer}
        played = self.pair.answer(name, self.count, seed=seed, **sizes)
        speed = self.count * self.given.answer / played.seconds
        self.speeds.setdefault(name, {})[seed] = speed
        self.plays.append({"name": name, "seed": seed, "tokens_per_second": speed, **played.notes})
        self.seconds[name] = self.seconds.get(name, 0.0) + played.seconds
        if name == AUTO:
            self.auto = played
        elif played.first_right is not None:
            self.first_right = played.first_right


def compare(given: argparse.Namespace) -> dict[str, Any]:
    """All rates and numbers of requests; what was found is kept as it comes."""
    began = time.perf_counter()
    print(f"about {expected_seconds(given):.0f} s on an H200, more where the goal is missed")
    pair = EnginePair(given)
    for what, seconds in pair.seconds.items():
        print(f"{what}: {seconds:.1f} s", flush=True)
    result = document(given, pair)
    known: dict[int, dict[str, Speeds]] = {count: {} for count in given.counts}
    for rate in given.rates:
        since = time.perf_counter()
        pair.become(rate)
        rows: list[dict[str, Any]] = []
        own = {"rate": rate, "rows": rows, "exchange_seconds": time.perf_counter() - since}
        result["rates"].append(own)
        for count in given.counts:
            if time.perf_counter() - began > given.time_limit:
                result["left_out"].append({"rate": rate, "requests": count})
                write(given, result)
                continue
            row = Contest(pair, given, count, known[count]).run()
            rows.append(row)
            known[count] = {n: {**v} for n, v in row["all"].items() if n in (NO_HEAD, PLAIN)}
            own["seconds"] = time.perf_counter() - since
            result["elapsed_seconds"] = time.perf_counter() - began
            print(line(rate, row, result["elapsed_seconds"]), flush=True)
            write(given, result)
    return result


def expected_seconds(given: argparse.Namespace) -> float:
    """What all contests will take, by those that were measured once."""
    share: float = (given.prompt + 4 * given.answer) / (
        512 + 4 * 256
    )  # of a token in prompt and answer
    each = sum(
        next((s for most, s in CONTEST_SECONDS.items() if count <= most), 0.13 * count)
        for count in given.counts
    )
    return START_SECONDS + len(given.rates) * (2 + each * share)


def line(rate: float, row: dict[str, Any], elapsed: float) -> str:
    speeds = "  ".join(f"{name} {v:.0f}" for name, v in row["tokens_per_second"].items())
    return (
        f"[{elapsed:5.0f} s] rate {rate}, {row['requests']:4d} requests: "
        f"auto {row['auto_to_best']:.3f} of K = {row['best_fixed']}, "
        f"{row['auto_to_no_head']:.3f} of no head; chose {row['auto_chose']}\n"
        f"        tokens/s: {speeds}{trouble(row['plays'])}"
    )


def trouble(plays: list[dict[str, Any]]) -> str:
    """What cost plays time that rounds did not take."""
    lines = [
        f"\n        {play['name']}: {what} {play[key]:.2f} of {play['seconds']:.2f} s"
        for play in plays
        for what, key in (("new rounds", "new_rounds_seconds"), ("garbage collector", "gc_seconds"))
        if play[key] > 0.01 * play["seconds"]
    ]
    return "".join(lines)


def document(given: argparse.Namespace, pair: EnginePair) -> dict[str, Any]:
    import torch

    is_cuda = torch.cuda.is_available() and given.device != "cpu"
    try:
        import triton

        version = triton.__version__
    except ModuleNotFoundError:
        version = None
    return {
        "hardware": torch.cuda.get_device_name() if is_cuda else platform.processor() or "CPU",
        "torch": torch.__version__, "triton": version, "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python3", *sys.argv]), "model": Path(given.model).name,
        "prompt": given.prompt, "answer": given.answer, "repeats": given.repeats,
        "goal": GOAL, "start_seconds": pair.seconds, "rates": [], "left_out": [],
    }  # fmt: skip


def write(given: argparse.Namespace, result: dict[str, Any]) -> None:
    rows = [row for one in result["rates"] for row in one["rows"]]
    for name in ("auto_to_best", "auto_to_no_head"):
        result[f"worst_{name}"] = min((row[name] for row in rows), default=None)
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--rates", default="0.2,0.5,0.8")
    parser.add_argument("--requests", default="1,4,16,80,256")
    parser.add_argument("--speculate", default="0,1,2,3,5,8", help="fixed numbers, ascending")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5, help="at most, of what is close")
    parser.add_argument("--seconds", type=float, default=2.0, help="played, no more repeats after")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="no row begins then")
    parser.add_argument("--kv-gib", type=float, default=36.0, help="K/V memory of each engine")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kernels", default="auto", choices=("auto", "on", "off"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.counts = [int(number) for number in given.requests.split(",")]
    given.fixed = [int(number) for number in given.speculate.split(",")]
    given.rates = [float(number) for number in given.rates.split(",")]
    result = compare(given)
    if not any(one["rows"] for one in result["rates"]):
        raise SystemExit(f"nothing was measured within {given.time_limit:.0f} s")
    if result["left_out"]:
        print(f"NOT MEASURED within {given.time_limit:.0f} s: {result['left_out']}")
    for name in ("worst_auto_to_best", "worst_auto_to_no_head"):
        verdict = "reached" if result[name] >= GOAL else "missed"
        print(f"{name.replace('_', ' ')}: {result[name]:.3f}, goal {GOAL} {verdict}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
