"""A process with one engine of one work tree: jobs come as lines of JSON, replies go back so.

Started by `process.py` with one JSON argument and PYTHONPATH set to the work tree. Only names that
every version of the package has are used. Standard output carries replies alone; what the engine or
a library prints goes to standard error, which is the worker's log.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import signal
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

_PARENT_DEATH_SIGNAL = 1  # of prctl(2)
_GPU_KV_GIB, _CPU_KV_GIB = 20.0, 0.5


def main() -> None:
    # An engine that outlives a benchmark that was killed would keep the GPU's memory.
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.argv[1])
    try:
        engine, facts = start(settings)
        tell(replies, facts)
        for line in sys.stdin:
            tell(replies, answer(engine, json.loads(line)))
    except Exception as error:
        traceback.print_exc()
        tell(replies, {"error": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from None


def tell(replies: TextIO, found: dict[str, Any]) -> None:
    replies.write(json.dumps(found) + "\n")
    replies.flush()


def start(settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The engine after its first token, and what it is."""
    import torch

    import headstart
    from headstart import Engine, SamplingParams

    found = Path(headstart.__file__).resolve()
    if not found.is_relative_to(settings["tree"]):
        raise RuntimeError(f"headstart is {found}, which is not in {settings['tree']}")
    has_gpu = settings["device"] != "cpu" and torch.cuda.is_available()
    kv_gib = settings["kv_gib"] or (_GPU_KV_GIB if has_gpu else _CPU_KV_GIB)
    options = {
        "speculate": settings["drafts"], "max_running_requests": settings["max_requests"],
        "max_model_len": settings["max_model_len"], "prefix_caching": False,
        "kv_bytes": int(kv_gib * 2**30), "device": settings["device"], **settings["options"],
    }  # fmt: skip
    if settings["model"] == "demo" and settings["drafts"] != 0:
        from headstart.demo.shipped import shipped_vocab  # as `headstart demo` runs it

        options["draft_vocab"] = str(shipped_vocab())
    engine = Engine(settings["model"], **options)
    made = time.time()
    first = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    engine.generate([[2, 3, 4]], first)
    return engine, {
        "until_made_seconds": made - settings["since"],
        "start_seconds": time.time() - settings["since"],
        "device": torch.cuda.get_device_name() if has_gpu else f"CPU ({platform.machine()})",
        "is_gpu": has_gpu, "torch": torch.__version__, "python": platform.python_version(),
        "threads": torch.get_num_threads(), "options": options, "notes": list(engine.notes),
    }  # fmt: skip


def answer(engine: Any, job: dict[str, Any]) -> dict[str, Any]:
    """All prompts at once; only the time inside the engine counts."""
    from headstart import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False
    )
    preempted = engine.stats.preemptions
    gc.collect()
    began = time.perf_counter()
    results = engine.generate(job["prompts"], params)
    seconds = time.perf_counter() - began
    first = [result.stats.first_token_seconds or 0.0 for result in results]
    return {
        "seconds": seconds,
        "first_token_seconds": statistics.median(first),
        "acceptance_length": statistics.fmean(r.stats.acceptance.length for r in results),
        "preemptions": engine.stats.preemptions - preempted,
        "texts": [result.outputs[0].token_ids for result in results],
    }


if __name__ == "__main__":
    main()
