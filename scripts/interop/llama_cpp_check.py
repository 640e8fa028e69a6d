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
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import vllm_counters as workload
from checkpoints import swap_fusion_halves, with_changed_head
from engine_check import ours
from vllm_engine import Served

from headstart.calibrate.tiny import write_tiny

FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text")
DEPTHS = (1, 3)
NEAR = 0.06  # in cumulative acceptance at a depth
_PORT = 8431
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


def get(path: str, body: dict[str, Any] | None = None) -> str:
    data = json.dumps(body).encode() if body is not None else None
    request = Request(f"http://127.0.0.1:{_PORT}{path}", data, {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


@contextmanager
def server(tree: Path, model: Path, depth: int, log: Path) -> Iterator[None]:
    words = [
        tree / "build/bin/llama-server", "-m", model, "--port", _PORT, "-c", 2048, "-np", 1,
        "-t", 1, "--no-warmup", "--metrics", "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32",
        "-ctvd", "f32",
    ]  # fmt: skip
    if depth:
        words += ["--spec-type", "draft-mtp", "--spec-draft-n-max", depth, "--spec-draft-p-min", 0]
    with log.open("w") as file:
        process = subprocess.Popen([str(word) for word in words], stdout=file, stderr=file)
        try:
            for _ in range(300):
                try:
                    get("/health")
                    break
                except URLError:
                    time.sleep(0.2)
            yield
        finally:
            process.kill()
            process.wait()


def theirs(tree: Path, model: Path, depth: int, vocab: int) -> Served:
    with server(tree, model, depth, model.with_suffix(f".{depth}.log")):
        fields = {"n_predict": workload.NUM_TOKENS, "temperature": 0, "return_tokens": True}
        asked = [
            {"prompt": ids, "cache_prompt": False, **fields} for ids in workload.prompts(vocab)
        ]
        tokens = [json.loads(get("/completion", body))["tokens"] for body in asked]
        metrics = get("/metrics")
    rounds = re.findall(r"^\S+num_drafts_total (\d+)", metrics, flags=re.M)
    accepted = re.findall(r"^\S+tokens_per_pos_total\{\S+ (\d+)", metrics, flags=re.M)
    return Served(tokens, int(rounds[0]), tuple(map(int, accepted)))


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
