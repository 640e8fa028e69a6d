"""What sparse attention by an indexer costs in a layer, beside dense attention over the context.

PYTHONPATH=. python3 benchmarks/gpu_sparse.py [--requests 1,16,64] [--rows 1,4]
    [--contexts 2048,8192,32768,131072] [--top-k 2048] [--heads 128] [--index-heads 64]

For each number of requests, rows and context, one JSON line: microseconds of the scores, of the
choice, of attention over the chosen entries, and of dense latent attention over all of them.
Sizes are those of DeepSeek-V3.2. Without a GPU the kernels run in Triton's interpreter: try
--requests 2 --rows 2 --contexts 40 --top-k 8 --heads 2 --index-heads 2.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
from graph_timing import DEVICE, device_name, seconds
from torch import Tensor

from headstart.backends.cuda.kernels.index_choice import Texts, choose_entries, index_scores
from headstart.backends.cuda.kernels.latent import cut_for, latent_attention

IS_GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if IS_GPU else torch.float32
PAGE, INDEX_DIM, MOST_BYTES = 16, 128, 60e9
_LAUNCHES = 8 if IS_GPU else 1
RANK, ROPE = (512, 64) if IS_GPU else (16, 4)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def measure(requests: int, rows: int, context: int, given: argparse.Namespace) -> dict[str, object]:
    blocks = -(-context // PAGE)
    slots, lines = requests * blocks * PAGE, requests * rows
    keys, entries = normal(slots, INDEX_DIM), normal(slots, RANK + ROPE)
    tables = torch.randperm(requests * blocks, device=DEVICE).view(requests, blocks).int()
    seen = torch.full((requests,), context - rows, dtype=torch.int32, device=DEVICE)
    texts = Texts(tables, seen, rows, PAGE, context)
    q, weights = normal(lines, given.index_heads, INDEX_DIM), normal(lines, given.index_heads)
    lifted, turned = (normal(requests, rows, given.heads, size) for size in (RANK, ROPE))
    scores = index_scores(q, weights.float(), keys, texts, given.top_k)
    chosen, last = choose_entries(scores, texts, given.top_k, lines)

    def attend(tables: Tensor, seen: Tensor, each: int, page: int, most: int) -> Tensor:
        own, rest = (part.view(len(seen), each, given.heads, -1) for part in (lifted, turned))
        cut = cut_for(len(seen), each * given.heads, DTYPE.itemsize)
        return latent_attention(
            own, rest, entries, tables, seen, scale=0.1, block_size=page, max_context=most, cut=cut
        )

    steps: dict[str, Callable[[], object]] = {
        "scores": lambda: index_scores(q, weights.float(), keys, texts, given.top_k),
        "choice": lambda: choose_entries(scores, texts, given.top_k, lines),
        "chosen": lambda: attend(chosen, last, 1, 1, given.top_k),
        "dense": lambda: attend(tables, seen, rows, PAGE, context),
    }
    found = {name: round(seconds([step] * _LAUNCHES) * 1e6, 1) for name, step in steps.items()}
    return {"requests": requests, "rows": rows, "context": context, "us": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, usual in (("requests", "1,16,64"), ("rows", "1,4"),
                        ("contexts", "2048,8192,32768,131072")):  # fmt: skip
        parser.add_argument(f"--{name}", default=usual)
    for name, number in (("top-k", 2048), ("heads", 128), ("index-heads", 64)):
        parser.add_argument(f"--{name}", type=int, default=number)
    given = parser.parse_args()
    print(json.dumps({"device": device_name(), "top_k": given.top_k}))
    for context in map(int, given.contexts.split(",")):
        for requests in map(int, given.requests.split(",")):
            if requests * context * (RANK + ROPE + INDEX_DIM) * DTYPE.itemsize > MOST_BYTES:
                continue
            for rows in map(int, given.rows.split(",")):
                print(json.dumps(measure(requests, rows, context, given)), flush=True)


if __name__ == "__main__":
    main()
