"""From the start of a process to its first token, and where the time goes.

PYTHONPATH=. python3 benchmarks/gpu_start.py MODEL [--speculate 3,auto] [--out FILE]

For every K, processes start one after the other and each answers a short prompt with one token:
the first finds no compiled kernels, the others find those. The checkpoint is read once before, so
that it lies in page cache as far as there is room. Where the time goes is sampled: 200 times a
second a thread notes which part of the start the main thread is in. Prints a table; the last line
is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from page_cache import read_all

# Parts of a start by the function that is their beginning; inside of several the innermost counts.
PARTS = {
    "build": "memory and the device's context",
    "fill_trunk": "weights",
    "load_stored_head": "weights",
    "PromptReader.tokenizer": "tokenizer",
    "EngineCore.create": "K/V memory and the other parts",
    "choose_library": "which library attends",
    "compile_all": "kernels found or compiled",
    "CapturedRounds.warm_up": "rounds captured",
    "profile_device_rounds": "rounds captured and timed",
    "profile_host_rounds": "rounds that the host drives, timed",
    "Engine.generate": "the first token",
}
IMPORTS, REST = "imports", "the rest"
_EVERY = 0.005  # seconds between two looks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--speculate", default="3,auto", help="default: %(default)s")
    parser.add_argument("--warm", type=int, default=2, help="starts that find compiled kernels")
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--length", type=int, default=4160, help="most tokens of a request")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kernels", default="auto", choices=("auto", "on", "off"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", metavar="SINCE", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        print(json.dumps(start(given)))
        return
    read_all(Path(given.model))
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python3", *sys.argv]), "python": platform.python_version(),
        "starts": [],
    }  # fmt: skip
    for drafts in given.speculate.split(","):
        with tempfile.TemporaryDirectory(prefix="kernels-") as cache:
            for number in range(1 + given.warm):
                found = in_a_process(given, drafts, cache)
                found = {"speculate": drafts, "finds_kernels": number > 0, **found}
                result["starts"].append(found)
                print(line(found), flush=True)
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def line(found: dict[str, Any]) -> str:
    kernels = "found" if found["finds_kernels"] else "compiled"
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found["parts"].items())
    seconds = found["seconds"]
    return (
        f"K = {found['speculate']}, kernels {kernels}: first token after {seconds:.1f} s; {parts}"
    )


def in_a_process(given: argparse.Namespace, drafts: str, cache: str) -> dict[str, Any]:
    """One start; its time includes that of Python itself."""
    sizes = ["--requests", str(given.requests), "--length", str(given.length)]
    since = time.time()
    done = subprocess.run(
        [sys.executable, __file__, given.model, "--speculate", drafts, *sizes,
         "--device", given.device, "--kernels", given.kernels, "--child", str(since)],
        env={**os.environ, "TRITON_CACHE_DIR": cache}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"a start with K = {drafts} failed (see above)")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def start(given: argparse.Namespace) -> dict[str, Any]:
    """The engine up to its first token, in this process; sampled from here on."""
    with Looks() as looks:
        import torch

        from headstart.engine.engine import Engine
        from headstart.sampling.params import SamplingParams

        drafts = given.speculate if given.speculate == "auto" else int(given.speculate)
        engine = Engine(
            given.model, speculate=drafts, device=given.device, kernels=given.kernels,
            max_running_requests=given.requests, max_model_len=given.length, prefix_caching=False,
        )  # fmt: skip
        asked = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        engine.generate([[2, 3, 4]], asked)
        seconds = time.time() - given.child
    is_gpu = engine.model.device.type == "cuda"
    return {
        "seconds": seconds, "parts": looks.parts(seconds), "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if is_gpu else "CPU",
    }  # fmt: skip


class Looks:
    """Which part of a start the main thread is in, again and again."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._main = threading.main_thread().ident
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Looks:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        # Time, not looks: with Python's lock taken for long, looks are rare.
        before = time.perf_counter()
        while not self._is_over.wait(_EVERY):
            frame = sys._current_frames().get(self._main or 0)
            now = time.perf_counter()
            self._seconds[part_of(frame)] += now - before
            before = now

    def parts(self, seconds: float) -> dict[str, float]:
        """Seconds by part in the order of their size; what was not seen is the rest."""
        found = {REST: 0.0, **self._seconds}
        found[REST] += seconds - sum(found.values())
        return dict(sorted(found.items(), key=lambda part: -part[1]))


def part_of(frame: FrameType | None) -> str:
    is_importing = False
    while frame is not None:
        name = frame.f_code.co_qualname
        if part := PARTS.get(name):
            return part
        is_importing |= name == "_find_and_load"
        frame = frame.f_back
    return IMPORTS if is_importing else REST


if __name__ == "__main__":
    main()
