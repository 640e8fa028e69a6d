"""Quantised checkpoints: our engine and vLLM on one GPU, in turns, in one run.

PYTHONPATH=. python3 benchmarks/gpu_quantized_vs_vllm.py --models FOLDER --out results.json
    [--cases fp8-row,fp8-block,awq,moe] [--time-limit 570] [--compile-first]
    [--vllm-env NAME=VALUE]

Calibrated checkpoints that are not in FOLDER are written first, side by side: sizes of MiMo-7B, and
a mixture of experts with DeepSeek-V3's widths and fewer layers and experts (`CASES`). vLLM's
engines are all started at once, ours as far as memory goes, and the rest when a case is done. A
case is measured as soon as both of its engines are there; processes that are still starting are
stopped meanwhile, so that nothing else runs. What fails is a line, and the others go on: ours is
measured alone where vLLM does not start. Results are written after every row.

Every answer is checked against the cycle that the trunk walks. Acceptance is that of one long
answer, as tokens per step; of vLLM's log are kept the kernels that it chose and the memory of its
weights. DeepGEMM and FlashInfer compile kernels for FP8 in blocks for minutes, unless
--compile-first has `versus/vllm_kernels.py` do it side by side while engines start (and --vllm-env
VLLM_DEEP_GEMM_WARMUP=skip keeps vLLM from asking for more than it uses); nothing is measured
before it is done. In the cases -cutlass vLLM is without those libraries. `--cases` bf16 and
fp8-online (both engines round a bf16 checkpoint while loading it) need 15 GB of disk more.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from versus.measure import Sizes, Turns, speeds
from versus.process import Failed, Worker, settings_of
from versus.quantized_cases import (
    ACTIVE,
    ANSWER,
    CASES,
    DRAFTS,
    GIB,
    PROMPT,
    RATE,
    SPARE_TOKENS,
    cycle_of,
    write_checkpoint,
)
from versus.quantized_page import figures, last_line, page, told, why
from versus.report import write_json
from versus.vllm_compiling import VllmCompiling

# Of the GPU, beside weights and K/V: context, captured rounds, workspace, copies for drafts.
_BESIDE = {"headstart": 4.0, "vllm": 5.0}
_COMPILING_GIB = 28  # of the processes that compile vLLM's kernels


class Run:
    """All cases: what is started, what is measured, and the document of it."""

    def __init__(self, given: argparse.Namespace):
        self._given, self._began = given, time.perf_counter()
        self._work = Path(tempfile.mkdtemp(prefix="quantized-"))
        self._sizes = Sizes(PROMPT, ANSWER, given.repeats, 0, (), given.agree)
        self._compiling: VllmCompiling | None = None
        self._engines: dict[tuple[str, str], Worker] = {}
        self._ready: dict[tuple[str, str], dict[str, Any] | None] = {}
        self._needed: dict[tuple[str, str], float] = {}
        self.document: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python3", *sys.argv]), "device": "", "k": DRAFTS, "rate": RATE,
            "prompt": PROMPT, "answer": ANSWER, "repeats": given.repeats, "cases": {},
            "failures": [],
        }  # fmt: skip
        self.say(f"logs of the engines: {self._work}")

    def make(self) -> None:
        """Write checkpoints that are missing, side by side."""
        missing = {
            case.folder: case
            for case in (CASES[name] for name in self._given.cases)
            if not cycle_of(self._given.models / case.folder).exists()
        }
        with ProcessPoolExecutor(max(1, min(8, len(missing)))) as pool:
            jobs = {
                folder: pool.submit(
                    write_checkpoint, case.shape, case.weights, self._given.models / folder, ACTIVE
                )
                for folder, case in missing.items()
            }  # fmt: skip
            for folder, job in jobs.items():
                try:
                    job.result()
                    self.say(f"wrote {folder}")
                except Exception as error:
                    self._fail(f"{folder} was not written: {type(error).__name__}: {error}")

    def run(self) -> None:
        waiting = [
            name for name in self._given.cases
            if cycle_of(self._given.models / CASES[name].folder).exists()
        ]  # fmt: skip
        for name in waiting:
            folder = self._given.models / CASES[name].folder
            size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            self.document["cases"][name] = {
                "shape": CASES[name].shape, "weights": CASES[name].weights, "file_bytes": size,
                "engines": {}, "rows": [],
            }  # fmt: skip
        if self._given.compile_first:
            models = [self._given.models / CASES[name].folder for name in waiting]
            self._compiling = VllmCompiling(
                models, self._work / "kernels.log", self._given.vllm_python, self._given.vllm_env
            )
        try:
            while waiting:
                self._launch(waiting)
                self._settle()
                is_late = self._seconds() > self._given.time_limit
                name = self._next(waiting, is_late)
                if name is not None:
                    self._measure(name)
                    waiting.remove(name)
                elif is_late:
                    break
                time.sleep(0.2)
            for name in waiting:
                self._fail(f"{name}: not measured, {self._given.time_limit:.0f} s were over")
        finally:
            for worker in self._engines.values():
                worker.stop()
            if self._compiling is not None:
                self._compiling.stop()
            self.write()

    def _is_compiling(self) -> bool:
        """Whether vLLM's kernels still compile; what was said is kept when they are done."""
        if self._compiling is None or self._compiling.is_running:
            return self._compiling is not None
        if "compiled" not in self.document:
            lines = self._compiling.lines
            self.document["compiled"] = [line for line in lines if line.startswith("[")]
            self.say(f"kernels of vLLM: {lines[-1] if lines else 'nothing compiled'}")
        return False

    def _launch(self, waiting: list[str]) -> None:
        """Start what has room: the first case, then vLLM's of others, which take longest.

        Room for one of ours is always left, or two of vLLM's could wait for each other's.
        """
        engines, room = self._given.engines, self._given.gpu_gib
        if self._is_compiling():
            room -= _COMPILING_GIB
        others = [(name, engine) for engine in engines[::-1] for name in waiting[1:]]
        for key in [*((waiting[0], engine) for engine in engines), *others]:
            if key in self._engines or key in self._ready:
                continue
            ours = [
                self._gib(name, "headstart") for name in waiting
                if (name, "headstart") not in self._engines and key[1] != "headstart"
            ]  # fmt: skip
            needed = self._gib(*key)
            if sum(self._needed.values()) + needed + max(ours, default=0) > room:
                continue
            self._needed[key] = needed
            self._engines[key] = Worker(key[1], self._settings(*key), self._work)
            self.say(f"{key[0]}: {key[1]} starts, {needed:.0f} GiB of the GPU")

    def _gib(self, name: str, engine: str) -> float:
        files = self.document["cases"][name]["file_bytes"]
        return float((files + CASES[name].kv_bytes) / GIB + _BESIDE[engine])

    def _settings(self, name: str, engine: str) -> dict[str, Any]:
        case, is_vllm = CASES[name], engine == "vllm"
        model = self._given.models / case.folder
        told = {"VLLM_LOGGING_LEVEL": "INFO", **self._given.vllm_env, **case.vllm_env}
        environment = told if is_vllm else {}
        own: dict[str, Any] = {"kv_cache_memory_bytes": case.kv_bytes} if is_vllm else {}
        return {
            **settings_of(engine, self._given.vllm_python if is_vllm else None, environment),
            "model": str(model.resolve()), "drafts": DRAFTS, "max_requests": max(case.requests),
            "max_model_len": PROMPT + ANSWER + SPARE_TOKENS, "draft_vocab": 0,
            "kv_gib": case.kv_bytes / GIB, "memory": self._given.vllm_memory,
            "patience": self._given.patience, "active": ACTIVE,
            "cycle": str(cycle_of(model).resolve()),
            "options": {**own, **(case.vllm if is_vllm else case.headstart)},
        }  # fmt: skip

    def _settle(self) -> None:
        """Note which engines have started and which never will."""
        for key, worker in self._engines.items():
            if key in self._ready or not (worker.has_settled or worker.is_overdue):
                continue
            name, engine = key
            own = self.document["cases"][name]["engines"].setdefault(engine, {})
            try:
                found = self._ready[key] = worker.started()
            except Failed as failure:
                self._ready[key] = None
                own["error"] = str(failure)
                self._fail(f"{name}: {engine} did not start: {why(str(failure))}")
                worker.stop()
                continue
            worker.settings["patience"] = self._given.cell_limit
            self.document["device"] = found["device"]
            own.update(found)
            if engine == "vllm":
                own["log"] = told(worker.log)
            self.say(f"{name}: {engine} is there after {found['start_seconds']:.0f} s")
            self.write()

    def _next(self, waiting: list[str], is_late: bool) -> str | None:
        """A case whose engines are all there; when time is over also one with ours alone."""
        if self._is_compiling() and not is_late:
            return None
        for name in waiting:
            ready = [self._ready.get((name, engine), 0) for engine in self._given.engines]
            if all(found != 0 for found in ready) or (is_late and any(ready)):
                return name
        return None

    def _measure(self, name: str) -> None:
        """Rows of a case, while nothing else runs; then its engines end."""
        keys = [(name, engine) for engine in self._given.engines]
        workers = [self._engines[key] for key in keys if self._ready.get(key)]
        starting = [
            worker for key, worker in self._engines.items()
            if key not in self._ready and key not in keys
        ]  # fmt: skip
        for worker in starting:
            worker.pause()
        began = time.perf_counter()
        for requests in CASES[name].requests:
            turns = Turns(workers)
            found = speeds(turns, self._sizes, requests) if workers else {}
            for failure in turns.failures:
                self._fail(f"{name}, {requests} requests: {why(failure)}")
            workers = [worker for worker in workers if worker.is_running]
            self.document["cases"][name]["rows"].append({"requests": requests, "engines": found})
            self.say(f"{name}, {requests} requests: {figures(found)}")
            self.write()
        for worker in workers:
            self._tokens_per_step(name, worker)
        self.say(f"{name}: measured in {time.perf_counter() - began:.0f} s")
        for key in keys:
            if key not in self._ready and key in self._engines:
                log = self._engines[key].log
                self.document["cases"][name]["engines"][key[1]] = {"unready_log": log[-3000:]}
                self._fail(
                    f"{name}: {key[1]} was not there in time; it said last: {last_line(log)}"
                )
            if key in self._engines:
                self._engines.pop(key).stop()
            self._ready.setdefault(key, None)
            self._needed.pop(key, None)
        for worker in starting:
            worker.waited += time.perf_counter() - began
            worker.resume()

    def _tokens_per_step(self, name: str, worker: Worker) -> None:
        try:
            found = worker.ask("first", prompt=64, tokens=ANSWER, seed=5)
        except Failed as failure:
            self._fail(f"{name}: {worker.name}'s acceptance: {why(str(failure))}")
            return
        own = self.document["cases"][name]["engines"][worker.name]
        own["tokens_per_step"] = found["tokens_per_step"]

    def write(self) -> None:
        self.document["seconds"] = self._seconds()
        if self._given.out:
            write_json(self.document, self._given.out)

    def _seconds(self) -> float:
        return time.perf_counter() - self._began

    def _fail(self, what: str) -> None:
        self.document["failures"].append(what)
        self.say(f"FAILED {what}")
        self.write()

    def say(self, text: str) -> None:
        print(f"[{self._seconds():6.1f} s] {text}", flush=True)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument(
        "--cases", default="fp8-row,awq,moe,fp8-block", help="of " + ", ".join(CASES)
    )
    parser.add_argument("--engines", default="headstart,vllm")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--agree", type=float, help="repeat until two differ by less than this "
                        "share, instead: engines that still compile get faster")  # fmt: skip
    parser.add_argument("--gpu-gib", type=float, default=134, help="of the GPU, for all engines")
    parser.add_argument("--vllm-memory", type=float, default=0.05,
                        help="of the GPU that has to be free when vLLM starts")  # fmt: skip
    parser.add_argument("--patience", type=float, default=400, help="seconds for a start")
    parser.add_argument("--cell-limit", type=float, default=60, help="seconds for one answer")
    parser.add_argument("--time-limit", type=float, default=540, help="seconds for everything")
    parser.add_argument("--compile-first", action="store_true",
                        help="compile vLLM's kernels for blocks side by side")  # fmt: skip
    parser.add_argument("--make-only", action="store_true", help="write checkpoints and end")
    parser.add_argument("--vllm-python", help="interpreter of vLLM's environment")
    parser.add_argument("--vllm-env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.cases, given.engines = given.cases.split(","), given.engines.split(",")
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"--cases: {', '.join(unknown)} is unknown; known are {', '.join(CASES)}")
    given.vllm_env = dict(pair.split("=", 1) for pair in given.vllm_env)
    return given


def main() -> int:
    given = options()
    given.models.mkdir(parents=True, exist_ok=True)
    run = Run(given)
    run.make()
    if not given.make_only:
        run.run()
        print("\n" + page(run.document))
    return 1 if run.document["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
