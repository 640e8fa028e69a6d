"""`auto` against every fixed K, and against an engine without a head, on one GPU.

PYTHONPATH=. python3 benchmarks/gpu_auto.py MODEL... [--requests 1,4,16,80,256] [--out FILE]

MODEL are calibrated checkpoints, one for each acceptance rate. For each, two engines are started
one after the other, each in a process of its own: with `speculate="auto"`, whose requests then ask
for `auto` or for a fixed K, and with `speculate=0`, which runs without a head. They answer the
same prompts in turns, `auto` first. Fixed K rises until it is clearly slower than the best.
Output tokens per second with prefill included; every answer is checked against the cycle that
the trunk walks. Prints a table; the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

AUTO, NO_HEAD = "auto", "no head"
CLEARLY_SLOWER = 0.93  # of the best: more drafts will not be faster
WARM_PROMPT, WARM_ANSWER = 16, 24  # tokens: enough for the kinds of rounds to be captured
GOAL = 0.97  # of the best fixed K, and of an engine without a head


def work(given: argparse.Namespace) -> None:
    """A process with one engine: a job per line on stdin, what it took per line on stdout."""
    from headstart.calibrate.calibrated import agreement_of
    from headstart.engine.engine import Engine
    from headstart.sampling.params import SamplingParams

    started = time.perf_counter()
    engine = Engine(
        given.models[0], speculate="auto" if given.worker == AUTO else 0, device=given.device,
        max_running_requests=max(given.counts), prefix_caching=False,
        kv_bytes=int(given.kv_gib * 2**30), max_model_len=given.prompt + given.answer + 64,
    )  # fmt: skip
    engine.generate([[2, 3, 4]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    print(json.dumps({"start_seconds": time.perf_counter() - started}), flush=True)
    following = agreement_of(Path(given.models[0])).following.tolist()
    for line in sys.stdin:
        job = json.loads(line)
        draw = random.Random(job["seed"])
        tokens = range(2, given.active + 2 if given.active else len(following))
        prompts = [draw.choices(tokens, k=job["prompt"]) for _ in range(job["requests"])]
        params = SamplingParams(
            temperature=0, max_tokens=job["answer"], ignore_eos=True, detokenize=False,
            speculate=job["speculate"],
        )  # fmt: skip
        before, rounds = time.perf_counter(), dict(engine.stats.chosen_drafts)
        results = engine.generate(prompts, params)
        seconds = time.perf_counter() - before
        for prompt, result in zip(prompts, results, strict=True):
            token, text = prompt[-1], result.outputs[0].token_ids
            for chosen in text:
                token = following[token]
                assert chosen == token, "the text is not the cycle's"
            assert len(text) == job["answer"]
        played = {k: n - rounds.get(k, 0) for k, n in engine.stats.chosen_drafts.items()}
        reply = {
            "seconds": seconds, "chosen": {k: n for k, n in sorted(played.items()) if n},
            "reason": engine.stats.draft_reason,
        }  # fmt: skip
        print(json.dumps(reply), flush=True)


class Worker:
    """The other side of `work`."""

    def __init__(self, model: str, kind: str, given: argparse.Namespace):
        command = [sys.executable, __file__, model, "--worker", kind, "--device", given.device]
        for name in ("requests", "prompt", "answer", "kv_gib", "active"):
            command += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
        self.kind = kind
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.start_seconds = self._read()["start_seconds"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit(f"the engine ({self.kind}) ended with {self._process.wait()}; see above.")

    def ask(self, **job: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


class Contest:
    """All contenders with one number of requests."""

    def __init__(self, workers: dict[str, Worker], given: argparse.Namespace, count: int):
        self._workers, self._given, self._count = workers, given, count
        self.speeds: dict[str, list[float]] = {}
        self.chosen: dict[str, int] = {}

    def run(self) -> dict[str, Any]:
        for repeat in range(self._given.repeats):
            if repeat == 0:
                self._first()
            else:
                for name in list(self.speeds)[:: -1 if repeat % 2 else 1]:
                    self._play(name, repeat)
        speed = {name: statistics.median(values) for name, values in self.speeds.items()}
        fixed = {name: value for name, value in speed.items() if name not in (AUTO, NO_HEAD)}
        best = max(fixed, key=lambda name: fixed[name])
        return {
            "requests": self._count, "tokens_per_second": speed, "all": self.speeds,
            "best_fixed": best, "auto_to_best": speed[AUTO] / fixed[best],
            "auto_to_no_head": speed[AUTO] / speed[NO_HEAD],
            "zero_to_no_head": speed.get("0", 0.0) / speed[NO_HEAD],
            "auto_chose": self.chosen,
        }  # fmt: skip

    def _first(self) -> None:
        """Every contender once, fixed numbers as far as they may still be the best."""
        for name in (AUTO, NO_HEAD):
            self._warm(name)
            self._play(name, 0)
        best = 0.0
        for drafts in self._given.fixed:
            self._warm(str(drafts))
            speed = self._play(str(drafts), 0)
            best = max(best, speed)
            if speed < CLEARLY_SLOWER * best:
                return

    def _warm(self, name: str) -> None:
        self._ask(name, prompt=WARM_PROMPT, answer=min(WARM_ANSWER, self._given.answer), seed=999)

    def _play(self, name: str, seed: int) -> float:
        found = self._ask(name, prompt=self._given.prompt, answer=self._given.answer, seed=seed)
        speed: float = self._count * self._given.answer / found["seconds"]
        self.speeds.setdefault(name, []).append(speed)
        if name == AUTO:
            self.chosen = found["chosen"]
        return speed

    def _ask(self, name: str, **job: Any) -> dict[str, Any]:
        worker = self._workers[NO_HEAD if name == NO_HEAD else AUTO]
        speculate = None if name in (AUTO, NO_HEAD) else int(name)
        return worker.ask(requests=self._count, speculate=speculate, **job)


def compare(model: str, given: argparse.Namespace) -> dict[str, Any]:
    """One checkpoint: two engines, all numbers of requests."""
    began = time.perf_counter()
    workers: dict[str, Worker] = {}
    for kind in (AUTO, NO_HEAD):  # in turn: rounds are timed at start, undisturbed
        workers[kind] = Worker(model, kind, given)
        print(f"{Path(model).name}: {kind} started in {workers[kind].start_seconds:.1f} s")
    rows = []
    for count in given.counts:
        row = Contest(workers, given, count).run()
        rows.append(row)
        speeds = "  ".join(f"{name} {v:.0f}" for name, v in row["tokens_per_second"].items())
        print(
            f"  {count:4d} requests: auto {row['auto_to_best']:.3f} of K = {row['best_fixed']}, "
            f"{row['auto_to_no_head']:.3f} of no head; chose {row['auto_chose']}\n"
            f"        tokens/s: {speeds}",
            flush=True,
        )
    for worker in workers.values():
        worker.stop()
    return {
        "model": Path(model).name, "rows": rows, "seconds": time.perf_counter() - began,
        "start_seconds": {kind: worker.start_seconds for kind, worker in workers.items()},
    }  # fmt: skip


def document(given: argparse.Namespace, found: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    rows = [row for one in found for row in one["rows"]]
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
        "command": shlex.join(["python3", *sys.argv]),
        "prompt": given.prompt, "answer": given.answer, "repeats": given.repeats,
        "goal": GOAL, "worst_to_best": min(row["auto_to_best"] for row in rows),
        "worst_to_no_head": min(row["auto_to_no_head"] for row in rows), "checkpoints": found,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--requests", default="1,4,16,80,256")
    parser.add_argument("--speculate", default="0,1,2,3,5", help="fixed numbers, ascending")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--kv-gib", type=float, default=36.0, help="K/V memory of each engine")
    parser.add_argument("--active", type=int, default=0, help="tokens in use, where not all are")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", choices=(AUTO, NO_HEAD), help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.counts = [int(number) for number in given.requests.split(",")]
    given.fixed = [int(number) for number in given.speculate.split(",")]
    if given.worker:
        work(given)
        return
    result = document(given, [compare(model, given) for model in given.models])
    for name in ("worst_to_best", "worst_to_no_head"):
        verdict = "reached" if result[name] >= GOAL else "missed"
        print(f"{name.replace('_', ' ')}: {result[name]:.3f}, goal {GOAL} {verdict}")
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
