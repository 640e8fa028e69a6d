"""Our engine against llama.cpp's server: Qwen3.5, dense and with experts.

    python scripts/interop/llama_cpp_check.py --tree DIR

DIR is llama.cpp's tree with build/bin/llama-server. A tiny checkpoint is converted by its own
converter and served without and with its head. Tokens must be ours for every K. Counters are close,
not equal: llama.cpp gives the head one row more at the beginning of a text (the first token, with
the state that was there before), and drafts no further than it was asked to write.

Prints a table, exits 1 on any failure.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from checkpoints import swap_fusion_halves, with_changed_head
from engine_check import ours
from llama_cpp_server import served
from vllm_engine import Served

from headstart.calibrate.tiny import write_tiny

FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text")
DEPTHS = (1, 3)
NEAR = 0.06  # in cumulative acceptance at a depth
_CONVERT = Path(__file__).with_name("llama_cpp_convert.py")


def convert(tree: Path, model: Path, out: Path) -> Path:
    """As GGUF, in FP32, with an end token that our engine never says to the prompts."""
    said = {token for tokens in ours(model, 0).tokens for token in tokens}
    end = min(set(range(len(said) + 1)) - said)
    words = [sys.executable, _CONVERT, tree, end, model, out]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"llama.cpp's converter failed: {done.stderr.strip().splitlines()[-1]}")
    return out


def theirs(tree: Path, model: Path, depth: int, vocab: int) -> Served:
    program = tree / "build/bin/llama-server"
    return served(program, model, depth, vocab, model.with_suffix(f".{depth}.log"))


def check(family: str, tree: Path, work: Path) -> list[str]:
    model = write_tiny(family, work / "model", dtype="F32")
    swapped = with_changed_head(model, work / "swapped", swap_fusion_halves)
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    gguf, failures = convert(tree, model, work / "model.gguf"), []
    plain = ours(model, 0).tokens
    if theirs(tree, gguf, 0, vocab).tokens != plain:
        failures.append(f"{family}, K=0: tokens differ")
    for depth in DEPTHS:
        own, other = ours(model, depth), theirs(tree, gguf, depth, vocab)
        control = ours(swapped, depth)
        print(f"{family:17} K={depth}  ours {own.rates}  llama.cpp {other.rates}  "
              f"swapped {control.rates}", flush=True)  # fmt: skip
        if not plain == own.tokens == other.tokens:
            failures.append(f"{family}, K={depth}: tokens differ")
        if not _is_near(own, other) or _is_near(control, other):
            failures.append(f"{family}, K={depth}: ours {own.rates}, llama.cpp {other.rates}")
    return failures


def _is_near(one: Served, other: Served) -> bool:
    return all(abs(a - b) <= NEAR for a, b in zip(one.rates, other.rates, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path(".interop/work"))
    options = parser.parse_args()
    failures = []
    for family in FAMILIES:
        work = (options.work / f"llama-{family}").resolve()
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        failures += check(family, options.tree.resolve(), work)
    print("\n".join([*failures, f"{len(FAMILIES)} checked, {len(failures)} failures"]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
