"""What a prefix costs in acceptance whose head entries an older head made.

    python benchmarks/head_swap.py benchmarks/copy_heavy.jsonl --out result.json
    python benchmarks/head_swap.py prompts.jsonl --old heads/3 --new heads/4 --out result.json

The demo's model, greedy, K = 3, one request at a time. An engine reads all prompts with the old
head, which fills the prefix cache; the new head is swapped in, and the prompts are answered from
that cache (kept), then with an empty one (fresh), then with the old head (old). Without --old the
old head is the new one with noise of several sizes, in parts of each tensor's own deviation: how
far the two lie apart decides what is lost. All texts must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from headstart.data.conversations import Conversation, read_conversations
from headstart.demo.shipped import shipped_head
from headstart.demo.unpacked import ready
from headstart.engine.engine import Engine
from headstart.sampling.acceptance import Acceptance
from headstart.sampling.params import SamplingParams

DRAFTS = 3


@dataclass(frozen=True)
class Answered:
    """All prompts once."""

    texts: list[list[int]]
    acceptance: Acceptance
    first_token_seconds: float
    cached: int

    def facts(self) -> dict[str, Any]:
        found = self.acceptance
        return {
            "acceptance_length": 1 + sum(found.accepted) / found.rounds,
            "conditional": [round(rate, 4) for rate in found.conditional],
            "mean_first_token_seconds": self.first_token_seconds,
            "cached_tokens": self.cached,
        }


def answer(engine: Engine, prompts: Sequence[Conversation], max_tokens: int) -> Answered:
    """One prompt at a time."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, speculate=DRAFTS)
    texts, total, seconds, cached = [], Acceptance(), 0.0, 0
    for prompt in prompts:
        (result,) = engine.generate([[prompt.messages[0]]], params)
        texts.append(result.outputs[0].token_ids)
        total.add(result.stats.acceptance)
        seconds += result.stats.first_token_seconds or 0.0
        cached += result.stats.num_cached_tokens
    return Answered(texts, total, seconds / len(prompts), cached)


def disturbed(head: Path, out: Path, noise: float) -> Path:
    """A head with noise in every tensor, `noise` times the tensor's own standard deviation."""
    shutil.copytree(head, out)
    file, draw = next(out.glob("*.safetensors")), torch.Generator().manual_seed(0)
    own = load_file(file)
    for name, value in own.items():
        wide = value.float()
        size = noise * (float(wide.std()) if wide.numel() > 1 else 0.0)
        own[name] = (wide + size * torch.randn(wide.shape, generator=draw)).to(value.dtype)
    save_file(own, file, metadata={"format": "pt"})
    return out


def compare(
    engine: Engine, old: Path, new: Path, prompts: Sequence[Conversation], max_tokens: int
) -> dict[str, Any]:
    engine.pool.drop_cache()
    engine.swap_head(old)
    answer(engine, prompts, 1)  # fills the cache, answers not among it
    started = time.perf_counter()
    engine.swap_head(new)
    swap_seconds = time.perf_counter() - started
    kept = answer(engine, prompts, max_tokens)
    fresh = without_cache(engine, prompts, max_tokens)
    engine.swap_head(old)
    before = without_cache(engine, prompts, max_tokens)
    assert kept.texts == fresh.texts == before.texts, "a swap changed a text"
    assert kept.cached > 64 * len(prompts), "the cache has lost what the old head read"
    found = {"kept": kept.facts(), "fresh": fresh.facts(), "old": before.facts()}
    lengths = {name: each["acceptance_length"] for name, each in found.items()}
    return {
        **found, "swap_seconds": swap_seconds,
        "lost": 1 - lengths["kept"] / lengths["fresh"],
        "gained_by_the_swap": lengths["kept"] / lengths["old"] - 1,
    }  # fmt: skip


def without_cache(engine: Engine, prompts: Sequence[Conversation], max_tokens: int) -> Answered:
    parts = []
    for prompt in prompts:
        engine.pool.drop_cache()
        parts.append(answer(engine, [prompt], max_tokens))
    total = Acceptance()
    for part in parts:
        total.add(part.acceptance)
    return Answered(
        [text for part in parts for text in part.texts], total,
        sum(part.first_token_seconds for part in parts) / len(parts), 0,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--model", help="default: the demo's")
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path, help="default: the shipped head")
    parser.add_argument("--noise", default="0.02,0.1,0.3", help="where --old is not given")
    parser.add_argument("--count", type=int, default=24, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    prompts = list(read_conversations(given.prompts))
    prompts = prompts[:: max(1, len(prompts) // given.count)][: given.count]
    new = given.new or shipped_head()
    assert new is not None, "there is no shipped head in this copy of the source: give --new"
    model = given.model or ready()
    # The more requests may run, the more blocks there are, which the cache needs.
    engine = Engine(
        model, new, speculate=DRAFTS, weights=given.weights, max_running_requests=given.count,
        max_model_len=1024, kv_bytes=1 << 29,
    )  # fmt: skip
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if given.old is not None:
            results[str(given.old)] = compare(engine, given.old, new, prompts, given.max_tokens)
        for text in [] if given.old is not None else given.noise.split(","):
            old = disturbed(new, Path(folder) / f"noise-{text}", float(text))
            results[f"noise {text}"] = compare(engine, old, new, prompts, given.max_tokens)
    for name, found in results.items():
        lengths = {k: found[k]["acceptance_length"] for k in ("old", "kept", "fresh")}
        print(name, {k: round(v, 3) for k, v in lengths.items()}, f"lost {found['lost']:.1%}")
    document = {
        "prompts": len(prompts), "cores": os.cpu_count(), "python": platform.python_version(),
        "torch": torch.__version__, "weights": given.weights, "results": results,
    }  # fmt: skip
    if given.out is not None:
        given.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
