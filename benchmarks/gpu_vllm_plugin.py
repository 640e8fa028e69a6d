"""Stock vLLM and vLLM with our plugin on one GPU, in turns, in one run.

PYTHONPATH=. python3 benchmarks/gpu_vllm_plugin.py --models FOLDER --out results.json
    [--cases vocab,graft] [--repeats 3] [--time-limit 420] [--smoke]

`vocab`: MiMo-7B's sizes, 151,680 tokens, K = 3. vLLM as it is, with a draft vocabulary of 32,000
tokens by the plugin, with its rows in int8, and with our worker that collects text and states
(collect), at 1, 16 and 80 requests; then a head that is always right is swapped in while 16
requests are answered (swap). `graft`: Qwen3-8B's sizes with a head in a folder of its own, run by
vLLM's class for MiMo-7B and by the plugin's own class.

Calibrated checkpoints that are not in FOLDER are written first (16 GB each), those of the second
case while the first is measured. The plugin is this checkout, in a folder that only those processes
see. Every answer is checked against the cycle that the trunk walks. vLLM's defaults hold: its newer
model runner, full graphs. Results are written after each step; what there is no time for is named.
--smoke: tiny models, for a vLLM on a CPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import sys
import tempfile
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from versus.measure import Sizes, Turns, first_tokens, speeds
from versus.plugin_cases import CASES, SMALL, WHOLE, Case, Scale, Variant, write_models
from versus.plugin_install import install
from versus.process import Failed, Worker, settings_of
from versus.report import write_json

from headstart.errors import HeadstartError
from headstart.vllm_plugin.collected import files, read

_LOOKED_AT = 8  # collected answers whose text is held against the cycle
_STARTING = 100.0  # seconds that a case needs before it measures anything


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
    run = Run(given, scale)
    print(f"logs of the engines: {run.work}", flush=True)
    site = install(run.work)
    writers = {}
    for number, name in enumerate(given.cases):
        writers[name] = multiprocessing.get_context("spawn").Process(
            target=write_models, args=(CASES[name], scale, given.models)
        )
        if number == 0:  # the next one's when this one is read: a disk writes one at a time
            writers[name].start()
    for number, name in enumerate(given.cases):
        writers[name].join()
        if number + 1 < len(given.cases):
            writers[given.cases[number + 1]].start()
        if writers[name].exitcode:
            run.failed(name, "its models could not be written")
            continue
        print(f"{name}: models after {time.perf_counter() - run.began:.0f} s", flush=True)
        if run.has_time(_STARTING if not given.smoke else 0, name):
            try:
                measure(run, given, scale, CASES[name], site)
            except HeadstartError as error:
                run.failed(name, error)
    run.save()
    return 1 if run.document["failures"] else 0


def measure(run: Run, given: argparse.Namespace, scale: Scale, case: Case, site: Path) -> None:
    variants = case.variants(scale, given.models, run.work)
    result: dict[str, Any] = {"engines": {}, "rows": [], "first": {}}
    run.document["cases"][case.name] = result
    workers: dict[str, Worker] = {}
    try:
        waves = [[name] for name in variants] if given.smoke else [list(variants)]
        for wave in waves:
            for name in wave:
                told = settings(given, scale, site, case, name, variants[name])
                workers[name] = Worker(name, told, run.work)
            for name in wave:
                started(run, result, workers, name)
        turns = Turns(list(workers.values()), run.document["failures"])
        sizes = Sizes(scale.prompt, scale.answer, given.repeats, 0, ())
        for requests in scale.requests:
            if not run.has_time(20 if not given.smoke else 0, f"{case.name}, {requests} requests"):
                continue
            row = {"requests": requests, **speeds(turns, sizes, requests)}
            result["rows"].append(row)
            print(json.dumps({n: v["value"] for n, v in row.items() if n != "requests"}),
                  f"at {requests}, {run.left:.0f} s left", flush=True)  # fmt: skip
            run.save()
        result["first"] = first_tokens(turns, sizes, scale.prompt)
        run.save()
        if case.collecting in workers:
            finish(run, scale, case, workers[case.collecting], variants, result)
    finally:
        for worker in workers.values():
            worker.stop()


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


def finish(
    run: Run, scale: Scale, case: Case, worker: Worker, variants: dict[str, Variant],
    result: dict[str, Any],
) -> None:  # fmt: skip
    """What was collected, and the swaps: to the other head and back."""
    try:
        said = worker.ask("call", method="headstart_collected")["found"]
        result["collected"] = {"said": said, **looked_at(run.work / "collected", worker)}
        print(f"collected: {result['collected']}", flush=True)
        swaps = result["swaps"] = []
        for head in (case.other_head(run.work), variants[case.collecting].model):
            found = worker.ask(
                "swap", requests=scale.swap_requests, prompt=scale.prompt,
                tokens=scale.swap_tokens, head=str(head.resolve()), seed=len(swaps),
            )  # fmt: skip
            swaps.append({"head": head.name, **found})
            print(json.dumps(swaps[-1]), flush=True)
            run.save()
    except Failed as failure:
        run.failed("collect and swap", failure)


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
        "max_requests": max(scale.requests), "max_model_len": scale.max_model_len,
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
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--python", help="the interpreter that has vLLM; this one by default")
    parser.add_argument("--patience", type=float, default=240, help="seconds for a start or a job")
    parser.add_argument("--time-limit", type=float, default=420, help="nothing is begun after it")
    parser.add_argument("--smoke", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
