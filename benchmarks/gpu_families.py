"""Every family beside vLLM on one GPU, as deep as fits: one checkpoint after another, in one run.

PYTHONPATH=. python3 benchmarks/gpu_families.py FOLDER [--families ernie,qwen3.5] [options]

For each family a calibrated checkpoint is written to FOLDER, unless it is there, compared by
gpu_vs_vllm.py (prompts of 1000 and answers of 400 tokens, K = 3 and 0, first tokens of 2500 and
30,000 tokens), and removed again if --remove says so. Engines are asked until two repeats in a row
agree. What fails, an engine's start or one cell, is told with its error and the rest goes on; an
engine that ended is started again for the next cell. FOLDER/NAME.json is written after every row.
Further options go to gpu_vs_vllm.py as they are. Ends with one line per family and JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VERSUS = Path(__file__).with_name("gpu_vs_vllm.py")
_ROOT = Path(__file__).parents[1]
_RATE = "0.8"
_PLAN = "3:1,16,64,128,first2500,first30000;0:1,16,64,128,first2500,first30000"


@dataclass(frozen=True)
class Case:
    """A shape, and how memory is shared: GiB of K/V and states for ours, a share for vLLM."""

    shape: str
    kv_gib: int = 16
    memory: float = 0.5


# About 45 GB each at most, and 128 requests of 1400 tokens in memory.
FAMILIES = {
    "ernie": Case("ernie-4.5-21b", kv_gib=14, memory=0.48),
    "qwen3.5": Case("qwen3.5-27b,layers=32", kv_gib=24, memory=0.55),
    "qwen3.5-moe": Case("qwen3.5-35b,layers=20", kv_gib=20),
    "qwen3-next": Case("qwen3-next-80b,layers=12", kv_gib=20),
    "glm": Case("glm-4.5-air,layers=7", kv_gib=12),
    "deepseek": Case("deepseek-v3,layers=10,experts=32", kv_gib=12),
    "deepseek-sparse": Case("deepseek-v3.2,layers=10,experts=32", kv_gib=12),
    "mimo-v2": Case("mimo-v2-flash,layers=16,experts=32", kv_gib=20),
    "step": Case("step-3.5-flash,layers=24,experts=32", kv_gib=20),
}


def main() -> int:
    given, rest = options()
    given.folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in given.families:
        print(f"== {name}: {FAMILIES[name].shape}", flush=True)
        try:
            found[name] = compare(name, given, rest)
        except (OSError, subprocess.CalledProcessError) as error:
            found[name] = {"failures": [f"not compared: {error}"], "rows": []}
        print(f"== {name}: {summary(found[name])}", flush=True)
        if given.remove:
            shutil.rmtree(given.folder / name, ignore_errors=True)
    print("\n".join(f"{name}: {summary(document)}" for name, document in found.items()))
    print(json.dumps(found))
    return 1 if any(document["failures"] for document in found.values()) else 0


def options() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--families", default=",".join(FAMILIES), help="default: %(default)s")
    parser.add_argument("--shape", help="another shape of the one family that is named")
    parser.add_argument("--plan", default=_PLAN, help="default: %(default)s")
    parser.add_argument("--agree", default="0.03")
    parser.add_argument("--remove", action="store_true", help="each checkpoint when it is done")
    given, rest = parser.parse_known_args()
    given.families = given.families.split(",")
    if unknown := set(given.families) - set(FAMILIES):
        known = ", ".join(FAMILIES)
        parser.error(f"--families: {', '.join(sorted(unknown))} is unknown; known are {known}")
    if given.shape and len(given.families) > 1:
        parser.error("--shape is for one family; name it by --families")
    return given, rest


def compare(name: str, given: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    """What gpu_vs_vllm.py wrote, however it ended."""
    case, model, out = FAMILIES[name], given.folder / name, given.folder / f"{name}.json"
    if not model.exists():
        command = ["-m", "headstart", "calibrate", "--shape", given.shape or case.shape,
                   "--acceptance", _RATE, "--out", str(model)]  # fmt: skip
        subprocess.run([sys.executable, *command], check=True, cwd=_ROOT)
    out.unlink(missing_ok=True)
    asked = [
        "--plan", given.plan, "--prompt", "1000", "--answer", "400", "--agree", given.agree,
        "--restart", "--skip-logits", "--memory", str(case.memory), "--kv-gib", str(case.kv_gib),
        "--vllm-env", "VLLM_LOGGING_LEVEL=INFO", "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run([sys.executable, str(_VERSUS), str(model), *asked, *rest])
    if not out.exists():
        return {"failures": [f"gpu_vs_vllm.py ended with {done.returncode}"], "rows": []}
    document: dict[str, Any] = json.loads(out.read_text())
    return document


def summary(document: dict[str, Any]) -> str:
    """Ratios by K and requests, above 1 where ours is faster, and how much failed."""
    parts = []
    for row in document["rows"]:
        ours, theirs = (row["engines"].get(engine) for engine in ("headstart", "vllm"))
        is_first = row["stage"] == "first"
        what = f"K={row['k']} " + (f"first {row['prompt']}" if is_first else str(row["requests"]))
        if not ours or not theirs:
            parts.append(f"{what} -")
        elif is_first:
            times = [own["first_token_seconds"]["value"] for own in (ours, theirs)]
            parts.append(f"{what} {times[1] / times[0]:.2f}x")
        else:
            parts.append(f"{what} {ours['value'] / theirs['value']:.2f}x")
    failures = len(document["failures"])
    return ", ".join(parts) + (f"; {failures} failed" if failures else "")


if __name__ == "__main__":
    sys.exit(main())
