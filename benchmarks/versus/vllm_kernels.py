"""Compile what vLLM compiles while it starts with FP8 in blocks, side by side, before it starts.

python3 benchmarks/versus/vllm_kernels.py MODEL [MODEL ...] [--processes 14] [--most-rows 16384]

DeepGEMM and FlashInfer compile a kernel for every size of matrix and range of rows when they first
meet it, one after the other, which takes vLLM's start minutes; what they compiled is kept on disk.
Here every process takes a matrix and some numbers of rows, through vLLM's own functions. With
VLLM_DEEP_GEMM_WARMUP=skip vLLM then only loads what it needs. Runs in vLLM's environment.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 128
# Parts that vLLM multiplies as one matrix.
MERGED = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"),
)  # fmt: skip
FEW = (1, 2, 4, 8, 16, 24)  # rows of FlashInfer's products
ROWS = (
    tuple(range(32, 129, 8)),
    tuple(range(136, 513, 8)),
    (576, 640, 768, 896, 1000, 1024, 1280, 1536, 2000, 2048, 3000, 4000, 4096),
    (6000, 8000, 8192, 10000, 12000, 14000, 15000, 16000, 16384),
)
Job = tuple[str, int, int, tuple[int, ...]]  # library, outputs, inputs, rows


def sizes(model: Path) -> set[tuple[int, int]]:
    """(outputs, inputs) of all matrices in FP8 that are no experts', merged as vLLM merges them."""
    found: dict[str, tuple[int, int]] = {}
    for file in model.glob("*.safetensors"):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header: dict[str, Any] = json.loads(stream.read(length))
        for name, entry in header.items():
            is_matrix = entry.get("dtype") == "F8_E4M3" and ".experts." not in name
            if is_matrix and name.endswith(".weight"):
                found[name.removesuffix(".weight")] = tuple(entry["shape"])
    for names in MERGED:
        for first in [name for name in found if name.endswith("." + names[0])]:
            parts = [first.removesuffix(names[0]) + name for name in names]
            if all(part in found for part in parts):
                inputs = found[first][1]
                outputs = sum(found.pop(part)[0] for part in parts)
                found[parts[0]] = outputs, inputs
    return set(found.values())


def jobs(models: list[Path], most_rows: int) -> Iterator[Job]:
    every = set().union(*map(sizes, models))
    own = sorted(size for size in every if size[0] % 64 == 0 and size[1] % BLOCK == 0)
    swapped: list[Job] = [("flashinfer", *size, FEW) for size in own]
    yield from swapped[:1]  # its library is built meanwhile, and others would only wait for that
    for rows in ROWS:
        kept = tuple(count for count in rows if count <= most_rows)
        yield from (("deep_gemm", *size, kept) for size in own if kept)
        if rows is ROWS[-2]:
            yield from swapped[1:]


def compile_one(job: Job) -> str:
    import torch
    from vllm.utils.deep_gemm import fp8_gemm_nt
    from vllm.utils.flashinfer import flashinfer_fp8_blockscale_gemm

    library, outputs, inputs, rows = job
    began, fp8 = time.time(), torch.float8_e4m3fn
    weight = torch.empty(outputs, inputs, device="cuda", dtype=fp8)
    scales = torch.ones(-(-outputs // BLOCK), inputs // BLOCK, device="cuda")
    try:
        for count in rows:
            if library == "flashinfer":
                x = torch.zeros(count, inputs, device="cuda", dtype=torch.bfloat16)
                flashinfer_fp8_blockscale_gemm(
                    input=x, weight=weight, weight_scale=scales, out_dtype=torch.bfloat16
                )
            else:
                rounded = torch.empty(count, inputs, device="cuda", dtype=fp8)
                sized = torch.ones(count, inputs // BLOCK, device="cuda")
                result = torch.empty(count, outputs, device="cuda", dtype=torch.bfloat16)
                fp8_gemm_nt((rounded, sized), (weight, scales), result)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # engines are starting beside it
        said = "compiled"
    except Exception as error:  # vLLM compiles it itself, or says why not
        said = f"{type(error).__name__}: {str(error)[:200]}"
    what = f"{library} {outputs}x{inputs}, rows {rows[0]} to {rows[-1]}"
    return f"{what}: {said}, {time.time() - began:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--most-rows", type=int, default=16384)
    parser.add_argument("--list", action="store_true", help="say what would be compiled, and end")
    given = parser.parse_args()
    todo, began = list(jobs(given.models, given.most_rows)), time.time()
    if given.list:
        print("\n".join(f"{library} {n}x{k} {rows}" for library, n, k, rows in todo))
        return
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        for said in pool.imap_unordered(compile_one, todo, chunksize=1):
            print(f"[{time.time() - began:5.0f} s] {said}", flush=True)


if __name__ == "__main__":
    main()
