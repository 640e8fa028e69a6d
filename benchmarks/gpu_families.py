"""Every family beside vLLM on one GPU, as deep as fits: one checkpoint after another.

PYTHONPATH=. python3 benchmarks/gpu_families.py FOLDER [--families ernie,qwen3.5]
    [--out RESULTS] [--time-limit 560] [options of gpu_vs_vllm.py]

For each family a calibrated checkpoint is written to FOLDER, unless it is there, and both engines
answer in turns, in one run of gpu_vs_vllm.py: prompts of 1000 and answers of 400 tokens with K = 3
and 0, first tokens of 2500 and 30,000 tokens. An engine is warm when two repeats in a row agree.
Rows come in the order of what is wanted most, and RESULTS/NAME.json is written after every one. No
stage begins after --time-limit seconds, writing included. Where vLLM does not start, its error is
kept and ours goes on alone. Each row has the time that bytes and arithmetic need on an H200
(versus/floor.py), and of vLLM's log the kernels that it took.

A checkpoint of --only-write is measured by a later call; FOLDER in memory (/dev/shm) is quicker.
At the end, and with --page from results that are there, all is told as one page.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from versus.families_page import page, summary
from versus.family_cases import ACTIVE, ANSWER, FAMILIES, GIB, PROMPT, RATE, needs_of
from versus.floor import add_floors
from versus.plan import parse_plan

_VERSUS = Path(__file__).with_name("gpu_vs_vllm.py")
_WRITE = Path(__file__).parent / "versus" / "quick_checkpoints.py"
_ROOT = Path(__file__).parents[1]
_PLAN = "3:64,16,1,128,first2500,first30000;0:64,16,1,128"
_PATIENCE = 420  # seconds for a start, or an answer
_VLLM_MEMORY = 0.05  # of the GPU that has to be free when vLLM starts: what it keeps is told


def main() -> int:
    given, rest = options()
    given.out = given.out or given.folder
    for folder in (given.folder, given.out):
        folder.mkdir(parents=True, exist_ok=True)
    began, found = time.perf_counter(), dict[str, dict[str, Any]]()
    for name in given.families:
        if given.page:
            found[name] = read(given.out / f"{name}.json")
            continue
        print(f"== {name}: {given.shape or FAMILIES[name].shape}", flush=True)
        left = given.time_limit - (time.perf_counter() - began)
        try:
            found[name] = compare(name, given, rest, left)
        except (OSError, subprocess.CalledProcessError) as error:
            found[name] = {"failures": [f"not compared: {error}"], "rows": []}
        print(f"== {name}: {summary(found[name])}", flush=True)
        if given.remove:
            shutil.rmtree(given.folder / name, ignore_errors=True)
    print(page(found))
    return 1 if any(document["failures"] for document in found.values()) else 0


def options() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--families", default=",".join(FAMILIES), help="default: %(default)s")
    parser.add_argument("--shape", help="another shape of the one family that is named")
    parser.add_argument("--plan", default=_PLAN, help="default: %(default)s")
    parser.add_argument("--active", default=str(ACTIVE), help="tokens in use of a checkpoint")
    parser.add_argument("--agree", default="0.03")
    parser.add_argument("--out", type=Path, help="folder of the results; default: FOLDER")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds, for all")
    parser.add_argument("--vllm-options", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--only-write", action="store_true", help="checkpoints, and end")
    parser.add_argument("--remove", action="store_true", help="each checkpoint when it is done")
    parser.add_argument("--page", action="store_true", help="of results in --out; runs nothing")
    given, rest = parser.parse_known_args()
    given.families = given.families.split(",")
    if unknown := set(given.families) - set(FAMILIES):
        known = ", ".join(FAMILIES)
        parser.error(f"--families: {', '.join(sorted(unknown))} is unknown; known are {known}")
    if given.shape and len(given.families) > 1:
        parser.error("--shape is for one family; name it by --families")
    return given, rest


def compare(name: str, given: argparse.Namespace, rest: list[str], left: float) -> dict[str, Any]:
    """What gpu_vs_vllm.py wrote within `left` seconds, however it ended."""
    case, model, out = FAMILIES[name], given.folder / name, given.out / f"{name}.json"
    began, shape = time.perf_counter(), given.shape or case.shape
    if not model.exists():
        command = [str(_WRITE), shape, str(model), "--rate", str(RATE), "--active", given.active]
        subprocess.run([sys.executable, *command], check=True, cwd=_ROOT)
    writing = time.perf_counter() - began
    if given.only_write:
        return {"failures": [], "rows": []}
    if left - writing <= 0:
        return {"failures": ["not compared: no time was left"], "rows": []}
    most = max(stage.requests for group in parse_plan(given.plan) for stage in group.stages)
    needs = needs_of(shape, most)
    told = {"kv_cache_memory_bytes": needs.vllm_kv, **case.vllm, **given.vllm_options}
    out.unlink(missing_ok=True)
    asked = [
        "--plan", given.plan, "--prompt", str(PROMPT), "--answer", str(ANSWER), "--agree",
        given.agree, "--overlap-start", "--restart", "--skip-logits", "--memory",
        str(_VLLM_MEMORY), "--kv-gib", str(needs.headstart_kv / GIB), "--vllm-options",
        json.dumps(told), "--patience", str(_PATIENCE), "--vllm-env", "VLLM_LOGGING_LEVEL=INFO",
        "--out", str(out),
    ]  # fmt: skip
    if left < float("inf"):
        asked += ["--time-limit", str(left - writing)]
    done = subprocess.run([sys.executable, str(_VERSUS), str(model), *asked, *rest])
    if not out.exists():
        return {"failures": [f"gpu_vs_vllm.py ended with {done.returncode}"], "rows": []}
    document = {**read(out), "write_seconds": writing, "needs": vars(needs)}
    add_floors(document)
    out.write_text(json.dumps(document, indent=1) + "\n")
    return document


def read(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {"failures": ["not compared: there are no results"], "rows": []}
    document: dict[str, Any] = json.loads(file.read_text())
    return document


if __name__ == "__main__":
    sys.exit(main())
