"""Stock vLLM and vLLM with our plugin on one GPU, in turns, in one run.

PYTHONPATH=. python3 benchmarks/gpu_vllm_plugin.py --models FOLDER --out results.json
    [--cases vocab,graft] [--repeats 3] [--time-limit 420] [--write-only] [--smoke]

`vocab`: MiMo-7B's sizes, 151,680 tokens, K = 3. vLLM as it is, with a draft vocabulary of 32,000
tokens by the plugin, and with its rows in int8, at 1, 16 and 80 requests; then a head that is
always right is swapped in while 16 requests are answered, and the first one back; then with our
worker that collects text and states, in turns with the one that does not. `graft`: Qwen3-8B's sizes
with a head in a folder of its own, run by vLLM's class for MiMo-7B and by the plugin's own class,
at 1 and 16 requests.

Calibrated checkpoints that are not in FOLDER are written first (16 GB each, --write-only: and
nothing else), those of the second case while engines of the first start. The plugin is this
checkout, in a folder that only those processes see. Every answer is checked against the cycle that
the trunk walks. vLLM's newer model runner and full graphs, as it chooses by itself; fewer sizes are
captured than it would (plugin_cases.py), which its start takes less time for. Results are written
after each step; a step that fails does not end the others, and what there is no time for is named.
--smoke: tiny models, also for a vLLM on a CPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from versus.measure import Sizes, Turns, speeds
from versus.plugin_cases import (
    CASES,
    SMALL,
    SMALL_ENGINE,
    WHOLE,
    Case,
    Scale,
    Variant,
    write_models,
)
from versus.plugin_install import install
from versus.process import Failed, Worker, settings_of
from versus.report import write_json

from headstart.errors import HeadstartError
from headstart.vllm_plugin.collected import files, read

_LOOKED_AT = 8  # collected answers whose text is held against the cycle
_STARTING, _ROW = 120.0, 20.0  # seconds that a case needs before it measures, and a row
_FEW = 16  # requests up to which answers take a second or two: they are repeated twice as often
_PROMPT = 64  # tokens of the prompt whose answer tells how many drafts are accepted


class Run:
    """What was found so far, written after every step."""

    def __init__(self, given: argparse.Namespace, scale: Scale):
        self.began = time.perf_counter()
        self.work = Path(tempfile.mkdtemp(prefix="vllm-plugin-"))
        self._out, self._limit = given.out, given.time_limit
        self.document: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python3", *sys.argv]), "k": scale.drafts, "rate": scale.rate,
            "active": scale.active, "prompt": scale.prompt, "answer": scale.answer,
            "repeats": given.repeats, "cases": {}, "failures": [],
        }  # fmt: skip

    @property
    def left(self) -> float:
        return float(self._limit - (time.perf_counter() - self.began))

    def has_time(self, seconds: float, what: str) -> bool:
        if self.left < seconds:
            self.failed(what, f"not measured, {self.left:.0f} s were left")
        return self.left >= seconds

    def failed(self, what: str, why: object) -> None:
        self.document["failures"].append(f"{what}: {why}")
        print(f"FAILED {what}: {str(why)[-600:]}", flush=True)
        self.save()

    def save(self) -> None:
        self.document["seconds"] = round(time.perf_counter() - self.began, 1)
        if self._out:
            write_json(self.document, self._out)


def main() -> int:
    given = options()
    scale = SMALL if given.smoke else WHOLE
    if given.smoke:
        own = SMALL_ENGINE[torch.cuda.is_available()]
        scale = replace(scale, engine={**scale.engine, **own})
    run = Run(given, scale)
    print(f"logs of the engines: {run.work}", flush=True)
    writers = {
        name: multiprocessing.get_context("spawn").Process(
            target=write_models, args=(CASES[name], scale, given.models)
        )
        for name in given.cases
    }
    site = install(run.work)
    # A disk writes one at a time: the next case's when this one's engines read theirs.
    for number, name in enumerate(given.cases):
        following = given.cases[number + 1 : number + 2]
        if number == 0:
            writers[name].start()
        writers[name].join()
        for other in following:
            writers[other].start()
        if writers[name].exitcode:
            run.failed(name, "its models could not be written")
            continue
        print(f"{name}: models after {time.perf_counter() - run.began:.0f} s", flush=True)
        if given.write_only or not run.has_time(0 if given.smoke else _STARTING, name):
            continue
        try:
            wait = [writers[other].join for other in following]
            measure(run, given, scale, CASES[name], site, wait)
        except (HeadstartError, OSError) as error:
            run.failed(name, error)
    run.save()
    return 1 if run.document["failures"] else 0


def measure(
    run: Run, given: argparse.Namespace, scale: Scale, case: Case, site: Path,
    wait: Sequence[Callable[[], None]],
) -> None:  # fmt: skip
    """All of a case; `wait` for what else is still busy on this machine."""
    variants = case.variants(scale, given.models, run.work)
    result: dict[str, Any] = {"engines": {}, "rows": [], "tokens_per_step": {}}
    run.document["cases"][case.name] = result
    workers: dict[str, Worker] = {}
    is_slow = given.smoke and not torch.cuda.is_available()
    try:
        waves = [[name] for name in variants] if is_slow else [list(variants)]
        for wave in waves:
            for name in wave:
                told = settings(given, scale, site, case, name, variants[name])
                workers[name] = Worker(name, told, run.work)
            for name in wave:
                started(run, result, workers, name)
        for each in wait:
            each()
        for number, names in enumerate(case.turns):
            if number == 1 and case.swapping in workers:
                swap(run, scale, case, workers[case.swapping], variants, result)
            rows(run, given, scale, case, [workers[n] for n in names if n in workers], result)
        if case.collecting in workers:
            collected(run, workers[case.collecting], result)
    finally:
        for worker in workers.values():
            worker.stop()


def rows(
    run: Run, given: argparse.Namespace, scale: Scale, case: Case, workers: list[Worker],
    result: dict[str, Any],
) -> None:  # fmt: skip
    """Speeds of some engines in turns, and what a round of each gives."""
    turns = Turns(workers, run.document["failures"])
    for requests in scale.requests[case.name]:
        repeats = given.repeats * (2 if requests <= _FEW else 1)
        sizes = Sizes(scale.prompt, scale.answer, repeats, 0, ())
        names = ", ".join(worker.name for worker in turns.workers)
        what = f"{case.name}, {requests} requests, {names}"
        if len(turns.workers) < 2 or not run.has_time(0 if given.smoke else _ROW, what):
            continue
        found = speeds(turns, sizes, requests)
        result["rows"].append({"requests": requests, **found})
        first = next(iter(found.values()), {"value": 0.0})["value"]
        shown = {n: [round(v["value"], 1), round(v["value"] / first, 4)] for n, v in found.items()}
        print(f"{requests} requests: {json.dumps(shown)}, {run.left:.0f} s left", flush=True)
        run.save()
    for worker in turns.workers:
        if worker.name in result["tokens_per_step"]:
            continue
        try:
            found = worker.ask("first", prompt=_PROMPT, tokens=scale.answer, seed=5)
        except Failed as failure:
            run.failed(f"{worker.name}, tokens per step", failure)
            continue
        result["tokens_per_step"][worker.name] = found["tokens_per_step"]
    print(f"tokens per step: {json.dumps(result['tokens_per_step'])}", flush=True)
    run.save()


def started(run: Run, result: dict[str, Any], workers: dict[str, Worker], name: str) -> None:
    try:
        found = workers[name].started()
    except Failed as failure:
        run.failed(name, failure)
        workers.pop(name).stop()
        return
    said = [line[-200:] for line in workers[name].log.splitlines() if "headstart:" in line]
    result["engines"][name] = {**found, "plugin": said}
    print(f"{name} is up after {found['start_seconds']:.0f} s: {said[:2]}", flush=True)
    run.save()


def swap(
    run: Run, scale: Scale, case: Case, worker: Worker, variants: dict[str, Variant],
    result: dict[str, Any],
) -> None:  # fmt: skip
    """To the head that is always right, and back."""
    swaps = result["swaps"] = []
    for head in (case.other_head(run.work), variants[case.swapping].model):
        try:
            found = worker.ask(
                "swap", requests=scale.swap_requests, prompt=scale.prompt,
                tokens=scale.swap_tokens, head=str(head.resolve()), seed=len(swaps),
            )  # fmt: skip
        except Failed as failure:
            run.failed(f"swap to {head.name}", failure)
            continue
        swaps.append({"head": head.name, **found})
        print(json.dumps(swaps[-1]), flush=True)
        run.save()


def collected(run: Run, worker: Worker, result: dict[str, Any]) -> None:
    try:
        said = worker.ask("call", method="headstart_collected")["found"]
        result["collected"] = {"said": said, **looked_at(run.work / "collected", worker)}
    except (Failed, HeadstartError) as failure:
        run.failed("what was collected", failure)
    else:
        print(f"collected: {result['collected']}", flush=True)
    run.save()


def looked_at(folder: Path, worker: Worker) -> dict[str, Any]:
    following = json.loads(Path(worker.settings["cycle"]).read_text())
    paths = files(folder)
    step = max(1, len(paths) // _LOOKED_AT)
    wrong = 0
    tokens = 0
    for path in paths[::step]:
        found = read(path)
        ids = found.ids.tolist()[found.num_prompt - 1 :]
        tokens += len(ids) - 1
        wrong += sum(following[a] != b for a, b in pairwise(ids))
    size = sum(path.stat().st_size for path in paths)
    return {"answers": len(paths), "bytes": size, "tokens_looked_at": tokens, "wrong": wrong}


def settings(
    given: argparse.Namespace, scale: Scale, site: Path, case: Case, name: str, variant: Variant
) -> dict[str, Any]:
    variables = {"PYTHONPATH": str(site)} if variant.has_plugin else {"VLLM_PLUGINS": "none"}
    return {
        **settings_of("vllm", given.python, {"VLLM_LOGGING_LEVEL": "INFO", **variables}),
        "model": str(variant.model.resolve()), "drafts": scale.drafts,
        "max_requests": max(scale.requests[case.name]), "max_model_len": scale.max_model_len,
        "draft_vocab": 0, "kv_gib": 0, "memory": scale.memory, "patience": given.patience,
        "active": scale.active, "cycle": str(case.cycle(given.models).resolve()),
        "options": {**scale.engine, **variant.told},
    }  # fmt: skip


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument(
        "--repeats", type=int, default=3, help=f"twice as many up to {_FEW} requests"
    )
    parser.add_argument("--python", help="the interpreter that has vLLM; this one by default")
    parser.add_argument("--patience", type=float, default=240, help="seconds for a start or a job")
    parser.add_argument("--time-limit", type=float, default=420, help="nothing is begun after it")
    parser.add_argument("--write-only", action="store_true", help="write checkpoints and end")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"--cases: {', '.join(unknown)} is unknown; known are {', '.join(CASES)}")
    return given


if __name__ == "__main__":
    sys.exit(main())
