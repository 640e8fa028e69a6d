"""Whole engines with the same prompts for several K, batches, chunks and memory sizes."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exact_check.sizes import Sizes
from headstart.calibrate.tiny import write_tiny
from headstart.engine.engine import Engine
from headstart.sampling.params import SamplingParams


def prompts_of(sizes: Sizes, count: int, vocab: int) -> list[list[int]]:
    host = torch.Generator().manual_seed(3)
    shared = torch.randint(2, vocab, (sizes.tokens // 2,), generator=host).tolist()
    lengths = torch.randint(1, 3 * sizes.tokens, (count,), generator=host).tolist()
    return [
        [*shared, *torch.randint(2, vocab, (length,), generator=host).tolist()]
        for length in lengths
    ]


def settings_of(sizes: Sizes, count: int) -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.3, "top_k": 30, "top_p": 0.95},
        {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.1, "repetition_penalty": 1.1},
        {"temperature": 0.8, "logprobs": 2},
    ]  # fmt: skip
    return [
        SamplingParams(max_tokens=sizes.tokens, ignore_eos=True, seed=i, **kinds[i % len(kinds)])
        for i in range(count)
    ]


@dataclass(frozen=True)
class Answers:
    """Texts with the log-probabilities that were asked for, and what the run was like."""

    texts: list[list[int]]
    logprobs: list[list[float]]
    first_accepted: float | None
    preemptions: int


def answers(folder: Path, sizes: Sizes, vocab: int, **options: Any) -> Answers:
    one_by_one = options.pop("one_by_one", False)
    count = sizes.prompts
    prompts, params = prompts_of(sizes, count, vocab), settings_of(sizes, count)
    engine = Engine(folder, max_running_requests=1 if one_by_one else count, **options)
    results = engine.generate(prompts, params)
    engine.scheduler.check()
    outputs = [result.outputs[0] for result in results]
    rates = engine.stats.acceptance.cumulative
    return Answers(
        [output.token_ids for output in outputs],
        [[entry.logprob for entry in output.logprobs or ()] for output in outputs],
        rates[0] if rates else None,
        engine.stats.preemptions,
    )


def first_difference(one: Answers, other: Answers) -> int | None:
    """The earliest token of any prompt at which two runs part."""
    places = [
        next((at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        for a, b in zip(one.texts, other.texts, strict=True)
    ]
    return min((place for place in places if place is not None), default=None)


def check_engines(sizes: Sizes, device: str, dtypes: list[str]) -> dict[str, Any]:
    small = sizes.hidden < 1024
    shape: dict[str, Any] = {
        "hidden_size": 64 if small else 1024, "num_attention_heads": 2 if small else 8,
        "num_key_value_heads": 1 if small else 2, "head_dim": 16 if small else 128,
        "intermediate_size": 64 if small else 2816, "num_hidden_layers": 1 if small else 4,
        "vocab_size": 64 if small else 4096, "max_position_embeddings": 128 if small else 1024,
    }  # fmt: skip
    vocab, modules = shape["vocab_size"], 1
    slot = 2 * shape["num_key_value_heads"] * shape["head_dim"]
    token = (shape["num_hidden_layers"] + modules) * slot + shape["hidden_size"] // 4
    # Tokens that fit: the longest request, and not all of them at their end.
    tight = max(4 * sizes.tokens + 8, sizes.prompts * sizes.tokens)
    base: dict[str, Any] = {"device": device, "kernels": "on", "block_size": 4}
    runs: dict[str, dict[str, Any]] = {
        "K=3": {"speculate": 3},
        "K=1, chunks of 20 rows, little memory": {"speculate": 1, "max_batched_tokens": 20},
        "K=3, one by one": {"speculate": 3, "one_by_one": True},
    }
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = write_tiny("mimo", Path(work) / "model", rate=0.9, seed=1, dtype="F32", **shape)
        for dtype in dtypes:
            width = 2 if dtype == "bfloat16" else 4
            ample = 8 * tight * token * width
            common = {**base, "dtype": dtype, "kv_bytes": ample}
            plain = answers(folder, sizes, vocab, speculate=0, **common)
            drafted = answers(folder, sizes, vocab, speculate=3, **common)
            report[f"{dtype} plain K=3"] = {"first difference": first_difference(plain, drafted)}
            common["exact"] = True
            wanted = answers(folder, sizes, vocab, speculate=0, one_by_one=True, **common)
            for name, options in runs.items():
                if "memory" in name:
                    options = {**options, "kv_bytes": tight * token * width}
                found = answers(folder, sizes, vocab, **{**common, **options})
                report[f"{dtype} exact {name}"] = {
                    "first difference": first_difference(wanted, found),
                    "same log-probabilities": wanted.logprobs == found.logprobs,
                    "first draft accepted": round(found.first_accepted or 0.0, 3),
                    "preemptions": found.preemptions,
                }
                print(f"{dtype} {name}: done", file=sys.stderr, flush=True)
    return report


# Windows, and choices of entries, that are shorter than texts.
OWN: dict[str, dict[str, Any]] = {
    "mimo_v2": {"sliding_window_size": 9},
    "step3p5": {"sliding_window": 9},
    "mellum": {"sliding_window": 9},
    "exaone_moe": {"sliding_window": 9, "sliding_windows": [9, 9, 0]},
    "deepseek_v32": {"index_topk": 12},
    "glm_moe_dsa": {"index_topk": 12, "indexer_types": ["full", "shared", "full"]},
}


def check_families(sizes: Sizes, device: str, dtypes: list[str], names: str) -> list[str]:
    """Families and runs whose texts or log-probabilities differ from those of single requests."""
    runs: dict[str, dict[str, Any]] = {
        "K=3": {"speculate": 3},
        "K=1, chunks of 20 rows": {"speculate": 1, "max_batched_tokens": 20},
    }
    wrong = []
    with tempfile.TemporaryDirectory() as work:
        for name in names.split(","):
            own = {"max_position_embeddings": 512, "vocab_size": 512, **OWN.get(name, {})}
            folder = write_tiny(name, Path(work) / name, rate=0.9, seed=1, dtype="F32", **own)
            for dtype in dtypes:
                common: dict[str, Any] = {
                    "device": device, "kernels": "on", "dtype": dtype, "exact": True,
                    "kv_bytes": 1 << 26, "block_size": 4,
                }  # fmt: skip
                wanted = answers(folder, sizes, 512, speculate=0, one_by_one=True, **common)
                for run, options in runs.items():
                    found = answers(folder, sizes, 512, **common, **options)
                    parts = first_difference(wanted, found)
                    is_same = parts is None and wanted.logprobs == found.logprobs
                    accepted = round(found.first_accepted or 0.0, 3)
                    word = "same" if is_same else f"DIFFERENT from token {parts}"
                    print(f"{name:14} {dtype:9} {run:24} {word} {accepted}", flush=True)
                    wrong += [] if is_same else [f"{name} {dtype} {run}"]
    return wrong
