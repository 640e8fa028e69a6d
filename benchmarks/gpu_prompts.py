"""Which attention reads prompts fastest on this GPU: our kernel, cuDNN, or one of another file.

PYTHONPATH=. python3 benchmarks/gpu_prompts.py [--shape mimo-7b] [--only cudnn] [--also FILE]

First attention alone: results against our kernel, the first call of a shape (a library may have to
plan it), then the median call. Then whole passes of the engine with random weights: 16 prompts of
2500 tokens and one of 30,000, in chunks of 8192 rows, and what the head does with a chunk. FILE may
hold one more `attend(q, k, v)`. Every line is JSON. Without a GPU all is tiny, and says only that
it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from functools import partial
from runpy import run_path
from typing import Any

import torch
from graph_timing import DEVICE, device_name, seconds, timed, wall
from random_models import hand_made, random_model
from torch import Tensor

from headstart.backends.base import BackendOptions, CacheSizes, HeadRows
from headstart.backends.cuda.attending import EVERYTHING
from headstart.backends.cuda.backend import CudaBackend
from headstart.backends.cuda.libraries import LIBRARIES, Library, choose_library
from headstart.backends.cuda.prompts import ragged_rows
from headstart.calibrate.shape_config import shape_config
from headstart.engine.request import Request
from headstart.engine.scheduler import Work
from headstart.models.attention import LayerCache, Span
from headstart.models.config import ModelConfig
from headstart.models.config_reader import model_config
from headstart.sampling.params import SamplingParams

IS_GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if IS_GPU else torch.float32
SCALE = 1 if IS_GPU else 100  # of all lengths
BLOCK, CHUNK = 16, 8192 // SCALE
SMALL = "layers=1,hidden=32,intermediate=32,heads=2,kv_heads=1,vocab=64"
# rows of a pass by request, and what each has before them
CASES = {
    "16 x 2500": ([2500 // SCALE] * 16, 0),
    "8192": ([CHUNK], 0),
    "8192 after 8192": ([CHUNK], CHUNK),
    "8192 after 21808": ([CHUNK], 21808 // SCALE),
}
PROMPTS = {"16 x 2500": [2500 // SCALE] * 16, "30000": [30000 // SCALE]}


def say(**row: Any) -> None:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}))


def compare_attention(config: ModelConfig, libraries: dict[str, Library | None]) -> None:
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    for case, (rows, before) in CASES.items():
        slots, count = sum(rows) + len(rows) * before, sum(rows)
        q = torch.randn(count, heads, dim, device=DEVICE, dtype=DTYPE)
        k, v = torch.randn(2, slots, kv_heads, dim, device=DEVICE, dtype=DTYPE).unbind()
        spans = [
            Span(i * n, (i + 1) * n, slice(0, n), slice(i * (before + n), (i + 1) * (before + n)))
            for i, n in enumerate(rows)
        ]
        positions = torch.arange(count, device=DEVICE)
        flops = 4 * heads * dim * sum(n * before + n * n / 2 for n in rows)
        wanted: Tensor | None = None
        for name, library in libraries.items():
            own = ragged_rows(spans, positions, library)
            attend = partial(own.attend, q, LayerCache(k, v), EVERYTHING)
            first, each = wall(attend), timed(attend) if IS_GPU else seconds([attend])
            found = attend().float()
            wanted = found if wanted is None else wanted
            gap = float((found - wanted).abs().max() / wanted.std())
            say(
                attention=case, by=name, us=each * 1e6, tflops=flops / each / 1e12,
                first_ms=first * 1e3, gap=gap, trouble=library and library.trouble,
            )  # fmt: skip


def passes(lengths: list[int]) -> list[list[Work]]:
    """Prompts in the order of their arrival, as many rows at a time as a pass has."""
    made: list[list[Work]] = [[]]
    room, first = CHUNK, 0
    for at, length in enumerate(lengths):
        blocks = -(-length // BLOCK)
        request = Request(
            str(at), [3] * length, SamplingParams(), 0, 1, frozenset(), 0,
            blocks=list(range(first, first + blocks)),
        )  # fmt: skip
        first, done = first + blocks, 0
        while done < length:
            rows = min(room, length - done)
            made[-1].append(Work(request, done, rows, ()))
            done, room = done + rows, room - rows
            if not room:
                made.append([])
                room = CHUNK
    return [works for works in made if works]


def compare_passes(config: ModelConfig, libraries: dict[str, Library | None]) -> None:
    longest = max(sum(lengths) + 16 * BLOCK for lengths in PROMPTS.values())
    trunk, head = random_model(config, DEVICE, DTYPE, longest)
    backend = CudaBackend(hand_made(trunk, head), BackendOptions(kernels="on"))
    backend.allocate(CacheSizes(longest // BLOCK, BLOCK))

    def read(plan: list[list[Work]], *, feeds_head: bool) -> None:
        for works in plan:
            backend.trunk_pass([work.rows(feeds_head=feeds_head) for work in works])

    for name, library in libraries.items():
        backend._library = library
        for case, lengths in PROMPTS.items():
            plan = passes(lengths)
            kinds = [("", True), (", no head", False)]
            for kind, feeds in kinds[: 1 if library else 2]:  # that does not depend on the library
                run = partial(read, plan, feeds_head=feeds)
                first, each = wall(run), statistics.median(wall(run) for _ in range(2))
                say(passes=case + kind, by=name, ms=each * 1e3, first_ms=first * 1e3)
        (states,), _ = backend.trunk_pass([plan[0][0].rows(feeds_head=True)])
        rows = [HeadRows([3] * (CHUNK - 1), 1, plan[0][0].request.blocks, states[:-1])]
        for what, read_by in (("run", backend.head_pass), ("fill", backend.fill_head)):
            read_by(0, rows)
            each = statistics.median(wall(partial(read_by, 0, rows)) for _ in range(5))
            say(head=what, by=name, ms=each * 1e3)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="mimo-7b" if IS_GPU else SMALL)
    parser.add_argument("--only", default=",".join(LIBRARIES), help="libraries beside our kernel")
    parser.add_argument("--also", help="a Python file with one more attend(q, k, v)")
    given = parser.parse_args()
    config = model_config(shape_config(given.shape))
    cudnn = torch.backends.cudnn.version()
    say(device=device_name(), torch=torch.__version__, cudnn=cudnn)
    libraries: dict[str, Library | None] = {"ours": None}
    shape = (config.num_heads, config.num_kv_heads, config.head_dim, DTYPE, DEVICE)
    for name in filter(None, given.only.split(",")):
        started = time.perf_counter()
        tiny = replace(LIBRARIES[name], least_rows=8, least_later_rows=8)
        found = choose_library(*shape, names=[name]) if IS_GPU else tiny
        say(library=name, usable=found is not None, start_ms=(time.perf_counter() - started) * 1e3)
        if found is not None:
            libraries[name] = found
    if given.also:
        libraries["also"] = Library("also", run_path(given.also)["attend"], 256, 256)
    compare_attention(config, libraries)
    compare_passes(config, libraries)


if __name__ == "__main__":
    main()
