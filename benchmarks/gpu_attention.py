"""Which cut of attention over paged contexts is fastest on this GPU, by requests and rows.

PYTHONPATH=. python3 benchmarks/gpu_attention.py [--requests 16,80] [--rows 1,2,4] [--context 3250]
    [--mixed] [--max-context 8192] [--heads 32] [--kv-heads 8] [--dim 128] [--kv-dtype fp8]
    [--own-cut | --own-steps]

Blocks of a request lie anywhere in the cache, several caches are read in turn, and launches are
captured in a graph. With --mixed contexts are as long as those of mixed loads over HTTP (at most
--context), as when many answers of a server are under way. --rows 32 are groups of a prompt that
joins a round. For each number of requests and rows: the cut that the engine takes, then the
fastest others, in terabytes of keys and values per second; a result that differs is an error. With
--kv-dtype fp8 the same contexts are read in 8-bit floats, too, in turns with those as they are, and
the ratio of the engine's cuts is printed; cuts are then of 8-bit floats.
Without a GPU the kernel runs in Triton's interpreter: try --requests 2 --context 40 --heads 2
--kv-heads 1 --dim 16.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # chosen before triton is imported

from graph_timing import DEVICE, device_name, seconds
from over_http.load import Sizes, lengths
from torch import Tensor

from headstart.backends.cuda.attending import cut_for
from headstart.backends.cuda.kernels.attention import paged_attention
from headstart.backends.cuda.kernels.attention_cuts import Cut, usual_context
from headstart.models.kv_fp8 import from_kv_fp8, to_kv_fp8

PAGE = 16
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
_CACHES = 4 if DEVICE.type == "cuda" else 1
_SHOWN = 4
# tokens of a step, warps, stages, registers
STEPS = [
    (64, 4, 2, None), (64, 4, 2, 96), (64, 4, 3, None), (64, 4, 1, None), (32, 4, 4, None),
    (32, 4, 3, 80), (128, 8, 2, None), (128, 4, 1, None), (64, 4, 4, None), (64, 8, 3, None),
]  # fmt: skip
# at most, tokens of one at least, levels
PIECES = [
    (8, 256, 0), (8, 384, 0), (32, 192, 0), (16, 512, 0), (16, 768, 0), (16, 1024, 0),
    (8, 2048, 0), (8, 4096, 0), (8, 256, 2), (8, 256, 3), (8, 256, 4),
]  # fmt: skip


@dataclass(frozen=True)
class Contexts:
    """Requests whose rows attend, and where their keys and values lie."""

    q: Tensor
    caches: list[tuple[Tensor, Tensor]]
    tables: Tensor
    seen: Tensor
    max_context: int
    sizes: list[Tensor] | None = field(default=None, kw_only=True)  # of caches in 8-bit floats

    @property
    def num_tokens(self) -> int:
        return int((self.seen + self.q.shape[1]).sum())

    @property
    def num_bytes(self) -> int:
        keys = self.caches[0][0]
        each = 2 * keys.shape[2] * keys.itemsize + (0 if self.sizes is None else 4)
        return self.num_tokens * keys.shape[1] * each

    def run(self, cut: Cut, at: int = 0, usual: Tensor | None = None) -> Tensor:
        return paged_attention(
            self.q, *self.caches[at], self.tables, self.seen, block_size=PAGE,
            max_context=self.max_context, cut=cut,
            usual=usual_context(self.seen, cut) if usual is None else usual,
            sizes=None if self.sizes is None else self.sizes[at],
        )  # fmt: skip

    def seconds(self, cut: Cut) -> float:
        usual = usual_context(self.seen, cut)  # once for all layers
        return seconds([partial(self.run, cut, at, usual) for at in range(_CACHES)] * 3)


def make(requests: int, rows: int, given: argparse.Namespace) -> Contexts:
    each = -(-(given.context + rows) // PAGE)
    draw = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=DEVICE).to(DTYPE)

    tables = (
        torch.randperm(requests * each, generator=draw, device=DEVICE).view(requests, each).int()
    )
    shape = (requests * each * PAGE, given.kv_heads, given.dim)
    caches = [(normal(*shape), normal(*shape)) for _ in range(_CACHES)]
    numbers = [given.context - rows] * requests
    if given.mixed:
        numbers = [max(0, min(number, given.context) - rows) for number in mixed(requests)]
    seen = torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
    most = max(given.max_context, each * PAGE)
    return Contexts(normal(requests, rows, given.heads, given.dim), caches, tables, seen, most)


def in_fp8(contexts: Contexts) -> tuple[Contexts, Contexts]:
    """The same in 8-bit floats, and the numbers that those mean, as they are."""
    caches, all_sizes, meant = [], [], []
    for k, v in contexts.caches:
        (k_words, k_sizes), (v_words, v_sizes) = to_kv_fp8(k), to_kv_fp8(v)
        caches.append((k_words, v_words))
        all_sizes.append(torch.stack([k_sizes, v_sizes], -1).contiguous())
        meant.append((from_kv_fp8(k_words, k_sizes, DTYPE), from_kv_fp8(v_words, v_sizes, DTYPE)))
    return replace(contexts, caches=caches, sizes=all_sizes), replace(contexts, caches=meant)


def compare(fp8: Contexts, plain: Contexts, cut: Cut) -> dict[str, Any]:
    """Seconds of the engine's cut for both, in turns."""
    torch.testing.assert_close(fp8.run(cut), plain.run(cut), rtol=0.02, atol=0.02)
    took: dict[str, list[float]] = {"fp8": [], "plain": []}
    for _ in range(3 if DEVICE.type == "cuda" else 1):
        took["plain"].append(plain.seconds(cut))
        took["fp8"].append(fp8.seconds(cut))
    middle = {name: sorted(own)[len(own) // 2] for name, own in took.items()}
    return {
        "plain_us": round(middle["plain"] * 1e6, 1), "fp8_us": round(middle["fp8"] * 1e6, 1),
        "ratio": round(middle["plain"] / middle["fp8"], 2),
        "bytes_ratio": round(plain.num_bytes / fp8.num_bytes, 2),
    }  # fmt: skip


def mixed(count: int) -> list[int]:
    """Tokens of requests of which each has written a part of its answer."""
    draw = random.Random(0)
    return [
        prompt + draw.randrange(answer) for prompt, answer in lengths(count, "contexts", Sizes())
    ]


def measure(contexts: Contexts, cuts: list[Cut]) -> list[dict[str, Any]]:
    """Figures of each cut that runs, the first one's first and the others by speed."""
    wanted = contexts.run(cuts[0])
    rows: list[dict[str, Any]] = []
    for cut in cuts:
        try:
            found = contexts.run(cut)
        except Exception as error:  # too much shared memory for this cut
            if "OutOfResources" not in type(error).__name__:
                raise
            continue
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
        took = contexts.seconds(cut)
        speed = contexts.num_bytes / took / 1e12
        rows.append(
            {"cut": vars(cut), "us": round(took * 1e6, 1), "tb_per_second": round(speed, 2)}
        )
    return [rows[0], *sorted(rows[1:], key=lambda row: row["us"])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", default="16,80")
    parser.add_argument("--rows", default="1,2,4")
    parser.add_argument("--context", type=int, default=3250)
    parser.add_argument("--mixed", action="store_true", help="contexts of many lengths")
    parser.add_argument("--max-context", type=int, default=0, help="that captured rounds allow")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--own-cut", action="store_true", help="try no other cuts: much quicker")
    parser.add_argument("--own-steps", action="store_true", help="try other pieces only")
    parser.add_argument("--kv-dtype", choices=("as-dtype", "fp8"), default="as-dtype")
    given = parser.parse_args()
    others = [
        Cut(pieces, least, levels, step=step, warps=warps, stages=stages, registers=most)
        for (pieces, least, levels), (step, warps, stages, most) in itertools.product(PIECES, STEPS)
    ]
    if given.own_cut:
        others = []
    elif DEVICE.type == "cpu":
        others = others[:2]
    results = []
    print(device_name(), "torch", torch.__version__)
    for requests, rows in itertools.product(
        *(map(int, n.split(",")) for n in (given.requests, given.rows))
    ):
        contexts, ratio = make(requests, rows, given), {}
        if given.kv_dtype == "fp8":
            contexts, plain = in_fp8(contexts)
            ratio = compare(contexts, plain, cut_for(requests, rows))
            print(f"{requests:4} requests, {rows} rows: {ratio}", flush=True)
        own = cut_for(requests, rows)
        if given.own_steps:
            others = [
                replace(own, pieces=pieces, least=least, levels=levels)
                for pieces, least, levels in PIECES
            ]
        found = measure(contexts, [own, *others])
        results.append({"requests": requests, "rows": rows, "cuts": found, **ratio})
        for place, row in enumerate(found[: 1 + _SHOWN]):
            name = "the engine's" if place == 0 else ""
            print(f"{requests:4} requests, {rows} rows {row['us']:8} us "
                  f"{row['tb_per_second']:5} TB/s {row['cut']} {name}", flush=True)  # fmt: skip
    print(json.dumps({"device": device_name(), "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
