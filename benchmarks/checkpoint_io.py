"""How fast export and stitch move bytes, and in how much memory, against `cp` plus `sync`.

Makes a checkpoint with the layout of DeepSeek-V3 (block FP8 with scales, BF16 parts, copies of
embedding and LM head in the MTP layer), scaled down, then runs the real command line in
alternation with `cp -r` of the same result and `sync` of its files. Sources are in the page
cache (warm) or were dropped from it before each run, on both sides (cold).

    python benchmarks/checkpoint_io.py --work DIR --out checkpoint_io.json

The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from headstart.bench.environment import processor_name
from headstart.calibrate.tensors import head_shapes, trunk_shapes
from headstart.checkpoint.config import Config
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.writer import FolderPlan, index_document, split_shards, write_folder
from headstart.families.registry import family

# DeepSeek-V3's own fields and number of experts; widths divided so that a MoE layer, and the head,
# has 1.6 GB instead of 11.5, and fewer layers.
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 32320,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 1,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}
BLOCK = 128
LAYER_BYTES = 1.62e9
FIXED_BYTES = 2.25e9  # a dense layer, embedding, LM head, the head and its copies of both
POOL_BYTES = 64 << 20
IN_BF16 = ("embed", "lm_head", "head.weight", "norm", "eh_proj", "mlp.gate.")
WARM, COLD = "warm", "cold"


def make_checkpoint(folder: Path, gigabytes: float, shard_bytes: int) -> None:
    """A checkpoint of about `gigabytes` with random bytes, in shards as published ones have."""
    layers = max(2, 1 + round((gigabytes * 1e9 - FIXED_BYTES) / LAYER_BYTES))
    config = {**CONFIG, "num_hidden_layers": layers}
    owner, fields = family("deepseek_v3"), Config(config).fields
    naming = owner.naming(fields)
    shapes = dict(trunk_shapes(owner, fields))
    for ours, shape in head_shapes(owner, fields).items():
        shapes[owner.keys.to_published(ours, naming)] = shape
    pool = _Pool()
    tensors: dict[str, TensorSource] = {}
    copies = {f"model.layers.{layers}.embed_tokens.weight": "model.embed_tokens.weight"}
    copies[f"model.layers.{layers}.shared_head.head.weight"] = "lm_head.weight"
    for name, shape in shapes.items():
        seed = copies.get(name, name)
        if len(shape) != 2 or any(part in name for part in IN_BF16):
            dtype = "F32" if name.endswith("e_score_correction_bias") else "BF16"
            tensors[name] = pool.tensor(seed, dtype, shape)
            continue
        tensors[name] = pool.tensor(seed, "F8_E4M3", shape)
        blocks = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
        tensors[f"{name}_scale_inv"] = pool.tensor(f"{name}_scale_inv", "F32", blocks)
    shards = split_shards(tensors, shard_bytes=shard_bytes)
    weight_map = {name: file for file, shard in shards.items() for name in shard.tensors}
    total = sum(source.num_bytes for source in tensors.values())
    documents = {
        "config.json": config,
        "generation_config.json": {"temperature": 0.6, "top_p": 0.95},
        "tokenizer_config.json": {"model_max_length": 163840},
        "model.safetensors.index.json": index_document(weight_map, total),
    }
    write_folder(FolderPlan(shards, {}, documents), folder, provenance={"operation": "benchmark"})


class _Pool:
    """Random numbers made once; each tensor is a window of them, chosen by its name."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        floats = random.uniform(0.5, 1.5, POOL_BYTES // 4).astype(np.float32)
        halves = (floats.view(np.uint32) >> 16).astype(np.uint16)
        eighths = random.integers(0, 0x7E, POOL_BYTES, dtype=np.uint8)  # no NaN among them
        self._pools = {"F32": floats.tobytes(), "F8_E4M3": eighths.tobytes()}
        self._pools["BF16"] = halves.tobytes()

    def tensor(self, seed: str, dtype: str, shape: tuple[int, ...]) -> TensorSource:
        pool = memoryview(self._pools[dtype])
        first = sum(seed.encode()) * 4096 % (len(pool) // 2)

        def pieces() -> Iterator[memoryview]:
            left, start = source.num_bytes, first
            while left:
                piece = pool[start : start + left]
                yield piece
                left, start = left - len(piece), 0

        source = TensorSource(dtype, shape, pieces, is_copy=False)
        return source


@dataclass(frozen=True)
class Measured:
    seconds: float
    cpu_seconds: float
    anonymous_bytes: int


def measure(command: list[str]) -> Measured:
    """Run a command to its end; wall time, processor time and the highest RssAnon seen."""
    started, used, peak = time.perf_counter(), _children_seconds(), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            peak = max(peak, _anonymous_bytes(status))
            time.sleep(0.002)
        seconds = time.perf_counter() - started
    if process.returncode != 0:
        raise SystemExit(f"{command[:4]} failed with exit code {process.returncode}")
    return Measured(seconds, _children_seconds() - used, peak)


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _anonymous_bytes(status: Path) -> int:
    try:
        lines = status.read_text().splitlines()
    except OSError:  # it ended just now
        return 0
    found = [line.split() for line in lines if line.startswith("RssAnon")]
    return int(found[0][1]) * 1024 if found else 0


def drop_from_cache(folder: Path) -> None:
    """Ask the kernel to forget the (clean) pages of all files of a folder; needs no rights."""
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def run_cases(work: Path, repeats: int, caches: list[str]) -> dict[str, Any]:
    model, head = work / "model", work / "head"
    cases = {
        "export": ["export", str(model), "--format", "headstart"],
        "export_xllm": ["export", str(model), "--format", "xllm"],
        "stitch": ["stitch", str(head), str(model)],
    }
    command = [sys.executable, "-m", "headstart"]
    measure([*command, *cases["export"], "--out", str(head)])
    startup = statistics.median(measure([*command, "--version"]).seconds for _ in range(repeats))
    results: dict[str, Any] = {"startup_seconds": round(startup, 3)}
    for name, arguments in cases.items():
        for cache in caches:
            same, result = work / "same", work / "result"  # the first result is what cp copies
            measure([*command, *arguments, "--out", str(same)])
            written = sum(file.stat().st_size for file in same.iterdir())
            copying = ["bash", "-c", 'cp -r "$0" "$1" && sync "$1"/* "$1"', str(same)]
            ours: list[Measured] = []
            plain: list[Measured] = []
            for repeat in range(repeats):
                # The order changes: what the first one left in memory costs the other one time.
                for is_ours in (True, False) if repeat % 2 else (False, True):
                    _prepare(work, cache, model, head, same)
                    if is_ours:
                        ours.append(measure([*command, *arguments, "--out", str(result)]))
                    else:
                        plain.append(measure([*copying, str(result)]))
                    shutil.rmtree(result)
            shutil.rmtree(same)
            results[f"{name}_{cache}"] = _summary(ours, plain, written)
            print(name, cache, json.dumps(results[f"{name}_{cache}"]), file=sys.stderr, flush=True)
    return results


def _prepare(work: Path, cache: str, *sources: Path) -> None:
    subprocess.run(["sync", "-f", str(work)], check=True)  # no run pays for what others left dirty
    for source in sources:
        if cache == COLD:
            drop_from_cache(source)
        else:
            for file in source.iterdir():
                with open(file, "rb", buffering=0) as handle:
                    while handle.read(1 << 24):
                        pass


def _summary(ours: list[Measured], plain: list[Measured], written: int) -> dict[str, Any]:
    ratios = [a.seconds / b.seconds for a, b in zip(ours, plain, strict=True)]
    seconds = statistics.median(m.seconds for m in ours)
    cp_seconds = statistics.median(m.seconds for m in plain)
    return {
        "bytes_written": written,
        "seconds": round(seconds, 3),
        "cp_sync_seconds": round(cp_seconds, 3),
        "ratio": round(seconds / cp_seconds, 3),
        "ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "cpu_seconds": round(statistics.median(m.cpu_seconds for m in ours), 3),
        "cp_sync_cpu_seconds": round(statistics.median(m.cpu_seconds for m in plain), 3),
        "load_average": round(os.getloadavg()[0], 1),
        "gigabytes_per_second": round(written / seconds / 1e9, 2),
        "peak_rss_anon_mib": round(max(m.anonymous_bytes for m in ours) / 2**20, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=5.5, help="size of the checkpoint")
    parser.add_argument("--shard-megabytes", type=float, default=400.0, help="size of its shards")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--cache", choices=(WARM, COLD, "both"), default="both")
    parser.add_argument("--work", type=Path, help="where to work; needs four times the size")
    parser.add_argument("--out", type=Path, help="also write the JSON document here")
    arguments = parser.parse_args()
    if arguments.work is not None:
        arguments.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.work, prefix="checkpoint_io-") as name:
        work = Path(name)
        make_checkpoint(work / "model", arguments.gigabytes, int(arguments.shard_megabytes * 1e6))
        checkpoint = Checkpoint.open(work / "model")
        sizes = [info.num_bytes for info in checkpoint.tensors.values()]
        caches = [WARM, COLD] if arguments.cache == "both" else [arguments.cache]
        document = {
            "benchmark": "checkpoint_io",
            "date": datetime.now(UTC).date().isoformat(),
            "hardware": {
                "cpu": processor_name(),
                "cores": len(os.sched_getaffinity(0)),
                "memory_gib": round(
                    os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
                ),
                "file_system": _file_system(work),
            },
            "versions": {
                "headstart": version("headstart"),
                "python": platform.python_version(),
                "torch": version("torch"),
                "linux": platform.release(),
            },
            "checkpoint": {
                "bytes": sum(sizes),
                "tensors": len(sizes),
                "shards": len(checkpoint.index.shards),
                "largest_tensor_mib": round(max(sizes) / 2**20, 1),
            },
            "repeats": arguments.repeats,
            "results": run_cases(work, arguments.repeats, caches),
        }
    text = json.dumps(document)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(document, indent=2) + "\n")
    print(text)


def _file_system(folder: Path) -> str:
    shown = subprocess.run(
        ["stat", "--file-system", "--format=%T", str(folder)], capture_output=True, text=True
    )
    return shown.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
