"""Two work trees of Headstart side by side, in turns: is the new one slower than the old one?

python3 benchmarks/before_after.py --old .before --new . MODEL [MODEL ...] --drafts 0,3
    --requests 1,4,16,80 --prompt 1000 --answer 400 --turns 5 --out results.json

MODEL is a checkpoint, best a calibrated one (`headstart calibrate`), or `demo`. For every K both
trees start an engine in a process of its own and answer the same prompts, other ones each turn;
which tree begins alternates. One turn before, which is not counted, compiles and captures. Answers
of a calibrated checkpoint are checked against the cycle that its trunk walks, and answers of both
trees against each other: in float32 they must be equal, in 16 bits the differing ones are counted.

--starts N times each tree starts alone, checkpoint and compiled code in page cache: seconds from
the start of the process to its first token. --server runs each tree's own server_overhead.py.
Results are written after every row. A ratio is speed of new over old; a row is `slower` where the
ratio of medians and the upper quartile of the ratios of turns both are below 0.98. The last line is
one JSON document; the exit status is 1 where a row is slower, texts are wrong or something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from trees.comparing import SLOWER, compare, described
from trees.process import Failed, Tree, Worker, run_program
from trees.workload import DEMO, Workload
from versus.report import write_json

_SPARE_TOKENS = 64  # of a request's length, beyond prompt and answer
_WARM_SEED = 999
_SIXTEEN_BITS = ("bfloat16", "float16")


class Late(Exception):
    """--time-limit is over: nothing more is begun."""


class Comparison:
    """One run; `document` is what is written after every row."""

    def __init__(self, given: argparse.Namespace, trees: tuple[Tree, Tree]):
        self._given, self._trees, self._began = given, trees, time.perf_counter()
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.document: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python3", *sys.argv]), "machine": machine(),
            "trees": {tree.name: tree.facts() for tree in trees}, "engines": [],
            "first_starts": [], "rows": self.rows, "failures": self.failures,
        }  # fmt: skip

    def run(self) -> None:
        for model in self._given.models:
            self._model(Workload.open(model, self._given))
        self.write()

    def _model(self, workload: Workload) -> None:
        given = self._given
        for drafts in given.drafts:
            self._guarded(f"{workload.name}, K = {drafts}", partial(self._speeds, workload, drafts))
        if given.starts:
            self._guarded(f"{workload.name}, start", partial(self._starts, workload))
        if given.server:
            self._guarded(f"{workload.name}, server", partial(self._servers, workload))

    def _guarded(self, what: str, work: Callable[[], None]) -> None:
        """A part that fails, or that there is no time for, does not end the run."""
        try:
            work()
        except Late:
            self._fail(f"{what}: not measured to the end, --time-limit was over")
        except Failed as failure:
            self._fail(f"{what}: {failure}")

    def _speeds(self, workload: Workload, drafts: int | str) -> None:
        with self._both(workload, drafts) as workers:
            for requests in self._given.requests:
                self._check_time()
                self._speed(workload, drafts, requests, workers)

    def _speed(
        self, workload: Workload, drafts: int | str, requests: int, workers: dict[str, Worker]
    ) -> None:
        given = self._given
        found: list[dict[str, dict[str, Any]]] = []
        differing = 0
        for turn in range(-1, given.turns):
            if turn > 0 and self._is_late:
                break
            prompts = workload.prompts(requests, _WARM_SEED if turn < 0 else turn)
            both = {tree.name: workers[tree.name].answer(prompts, given.answer)
                    for tree in self._order(turn)}  # fmt: skip
            for name, reply in both.items():
                workload.check(name, prompts, reply["texts"], given.answer)
            if turn >= 0:
                texts = zip(both["old"].pop("texts"), both["new"].pop("texts"), strict=True)
                differing += sum(old != new for old, new in texts)
                found.append(both)
        tokens = requests * given.answer
        rates = {
            name: [tokens / turn[name]["seconds"] for turn in found] for name in ("old", "new")
        }
        row = {
            "what": f"{workload.name}, K = {drafts}, {requests} requests", "kind": "speed",
            "model": workload.name, "k": drafts, "requests": requests,
            "prompt": None if workload.is_demo else given.prompt, "answer": given.answer,
            "unit": "tokens/s", **compare(rates["old"], rates["new"]),
            "answers": requests * len(found), "differing_answers": differing,
        }  # fmt: skip
        for figure in ("first_token_seconds", "acceptance_length", "preemptions"):
            row[figure] = {n: [turn[n][figure] for turn in found] for n in ("old", "new")}
        self._keep(row)
        if differing and not self._is_rounded:
            self._fail(f"{row['what']}: {differing} of {row['answers']} answers differ")

    def _starts(self, workload: Workload) -> None:
        """Each tree alone; what is compiled is there since the rows, or since a start before."""
        drafts = self._given.start_drafts
        seconds: dict[str, list[float]] = {"old": [], "new": []}
        if drafts not in self._given.drafts:
            for tree in self._trees:
                self._worker(tree, workload, drafts).stop()
        workload.read_all()
        self._check_time()
        for turn in range(self._given.starts):
            if turn and self._is_late:
                break
            for tree in self._order(turn):
                worker = self._worker(tree, workload, drafts)
                worker.stop()
                seconds[tree.name].append(worker.facts["start_seconds"])
        self._keep({
            "what": f"{workload.name}, K = {drafts}, start to first token", "kind": "start",
            "model": workload.name, "k": drafts, "unit": "s",
            **compare(seconds["old"], seconds["new"], is_time=True),
        })  # fmt: skip

    def _servers(self, workload: Workload) -> None:
        """Each tree's own program, because it counts inside of the server."""
        given = self._given
        found: dict[str, list[dict[str, Any]]] = {"old": [], "new": []}
        arguments = [workload.path, *given.server_arguments]
        self._check_time()
        for turn in range(given.turns):
            if turn and self._is_late:
                break
            for tree in self._order(turn):
                found[tree.name].append(
                    run_program(tree, "benchmarks/server_overhead.py", arguments, given.patience)
                )
        for key, unit in (
            ("http_tokens_per_second", "tokens/s"), ("http_of_offline_median", "of offline")
        ):  # fmt: skip
            figures = {n: [document[key] for document in own] for n, own in found.items()}
            self._keep({
                "what": f"{workload.name}, server, {key}", "kind": "server", "model": workload.name,
                "unit": unit, **compare(figures["old"], figures["new"]), "runs": found,
            })  # fmt: skip

    def _order(self, turn: int) -> tuple[Tree, Tree]:
        return self._trees if turn % 2 == 0 else self._trees[::-1]

    @contextmanager
    def _both(self, workload: Workload, drafts: int | str) -> Iterator[dict[str, Worker]]:
        """An engine of each tree, alive at the same time; idle ones only hold memory."""
        workload.read_all()
        workers: dict[str, Worker] = {}
        try:
            for tree in self._trees:
                self._check_time()
                worker = workers[tree.name] = self._worker(tree, workload, drafts)
                start = {n: worker.facts[n] for n in ("until_made_seconds", "start_seconds")}
                own = {"model": workload.name, "k": drafts, "tree": tree.name}
                self.document["first_starts"].append({**own, **start})
                told = ("device", "torch", "python", "threads", "options", "notes")
                self.document["engines"].append(
                    {**own, **{name: worker.facts[name] for name in told}}
                )
                took = f"{start['start_seconds']:.1f} s on {worker.facts['device']}"
                self._say(f"{workload.name}, K = {drafts}: {tree.name}'s first token after {took}")
            self._is_rounded = (
                workers["new"].facts["is_gpu"] or self._given.options.get("dtype") in _SIXTEEN_BITS
            )
            yield workers
        finally:
            for worker in workers.values():
                worker.stop()

    def _worker(self, tree: Tree, workload: Workload, drafts: int | str) -> Worker:
        given = self._given
        settings = {
            "model": workload.path, "drafts": drafts, "device": given.device,
            "max_requests": max(given.requests), "kv_gib": given.kv_gib,
            "max_model_len": workload.prompt_tokens + given.answer + _SPARE_TOKENS,
            "options": given.options,
        }  # fmt: skip
        return Worker(tree, settings, given.patience)

    def _keep(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._say(described(row))
        self.write()

    def write(self) -> None:
        self.document["elapsed_seconds"] = time.perf_counter() - self._began
        if self._given.out:
            write_json(self.document, self._given.out)

    @property
    def _is_late(self) -> bool:
        limit = self._given.time_limit
        return bool(limit) and time.perf_counter() - self._began > limit

    def _check_time(self) -> None:
        if self._is_late:
            raise Late

    def _fail(self, what: str) -> None:
        self.failures.append(what)
        self._say(f"FAILED {what}")
        self.write()

    def _say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._began:6.1f} s] {text}", flush=True)


def machine() -> dict[str, Any]:
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)), "system": platform.platform(),
        "load_average": os.getloadavg(),
    }  # fmt: skip


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--old", type=Path, required=True, metavar="TREE")
    parser.add_argument("--new", type=Path, required=True, metavar="TREE")
    parser.add_argument("--drafts", default="0,3", help="values of K, one engine each")
    parser.add_argument("--requests", default="1,4,16,80", help="requests at once")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens; demo asks questions")
    parser.add_argument("--answer", type=int, default=400, help="tokens")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--starts", type=int, default=0, metavar="N", help="of each tree, alone")
    parser.add_argument("--start-drafts", help="K of those starts; default: the last of --drafts")
    parser.add_argument("--server", action="store_true", help="run server_overhead.py as well")
    parser.add_argument(
        "--server-arguments", type=shlex.split, metavar="TEXT",
        default=["--repeats", "2", "--tokens", "32", "--speculate", "3", "--threads", "1"],
    )  # fmt: skip
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--weights", help="as the engine's option: int8, fp8")
    parser.add_argument("--threads", type=int, help="of each engine; default: it measures")
    parser.add_argument("--engine-options", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--kv-gib", type=float, help="of each engine; default: GPU 20, CPU 0.5")
    parser.add_argument("--time-limit", type=float, metavar="S", help="then nothing more begins")
    parser.add_argument("--patience", type=float, default=300, metavar="S",
                        help="end a process that takes longer for one start or turn")  # fmt: skip
    parser.add_argument("--work", type=Path, help="logs and compiled code; default: temporary")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.drafts = [int(k) if k.isdigit() else k for k in filter(None, given.drafts.split(","))]
    if unknown := [k for k in given.drafts if isinstance(k, str) and k != "auto"]:
        parser.error(f"--drafts: {unknown[0]!r} is neither a number nor auto")
    if given.start_drafts is None:
        given.start_drafts = given.drafts[-1] if given.drafts else 3
    elif given.start_drafts != "auto":
        given.start_drafts = int(given.start_drafts)
    given.requests = [int(number) for number in given.requests.split(",")]
    for model in given.models:
        if model != DEMO and not (Path(model) / "config.json").is_file():
            parser.error(f"{model} is no checkpoint: it has no config.json")
    given.old, given.new = given.old.resolve(), given.new.resolve()
    for tree in (given.old, given.new):
        if not (tree / "headstart" / "__init__.py").is_file():
            parser.error(f"{tree} holds no package headstart")
    own = {"weights": given.weights, "threads": given.threads}
    given.options = {n: v for n, v in own.items() if v is not None} | given.engine_options
    return given


def main() -> int:
    given = options()
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # server_overhead.py has no such option
    work = (given.work or Path(tempfile.mkdtemp(prefix="before-after-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    print(f"logs of the processes: {work}")
    comparison = Comparison(given, (Tree("old", given.old, work), Tree("new", given.new, work)))
    comparison.run()
    is_slower = any(row["verdict"] == SLOWER for row in comparison.rows)
    print(json.dumps(comparison.document))
    return 1 if comparison.failures or is_slower else 0


if __name__ == "__main__":
    sys.exit(main())
