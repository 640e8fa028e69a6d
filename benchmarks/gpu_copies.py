"""Drafts from the context beside the head, on one GPU: `auto` against the head alone.

PYTHONPATH=. python3 benchmarks/gpu_copies.py MODEL [--requests 1,16,64] [--shares 0.5,0] [--out F]

MODEL is a calibrated checkpoint: its trunk goes around a cycle of tokens, so prompts can hold spans
of what it will write (`headstart calibrate --copy-length`). One engine with `auto` answers prompts
of which that share stands in the prompt, by requests that leave the choice to it and by requests
that draft from the head alone, in turns; the first turn warms up and captures. Every answer is
checked against the cycle. Shown besides: what finding copies took the host per round, which runs
while the device works, and how many tokens were copied. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from headstart.calibrate.calibrated import agreement_of
from headstart.calibrate.copy_prompts import CopyPlan, CopyPrompt, copy_prompts
from headstart.engine.engine import Engine
from headstart.engine.options import EngineOptions
from headstart.sampling.params import SamplingParams

SIDES: tuple[Literal["auto", "head"], ...] = ("auto", "head")


def play(
    engine: Engine, prompts: list[CopyPrompt], side: Literal["auto", "head"], tokens: int
) -> dict[str, float]:
    """All prompts at once: tokens per second, and what finding copies took."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, draft_from=side)
    sources = engine.loop.sources
    assert sources is not None
    engine.pool.drop_cache()
    before, rounds = sources.copy_seconds, engine.stats.rounds.total()
    copied = engine.stats.copied_accepted
    started = time.perf_counter()
    results = engine.generate([one.ids for one in prompts], [params] * len(prompts))
    seconds = time.perf_counter() - started
    for result, one in zip(results, prompts, strict=True):
        assert result.outputs[0].token_ids == one.answer[:tokens], "not the trunk's cycle"
    made = engine.stats.rounds.total() - rounds
    total = sum(len(result.outputs[0].token_ids) for result in results)
    return {
        "tokens_per_second": total / seconds,
        "copy_microseconds_per_round": 1e6 * (sources.copy_seconds - before) * len(prompts) / made,
        "copied_share": (engine.stats.copied_accepted - copied) / total,
        "acceptance_length": total / made,
    }


def contest(
    engine: Engine, model: Path, given: argparse.Namespace, count: int, share: float
) -> Any:
    plan = CopyPlan(
        length=given.length, share=share, prompts=count * (1 + given.repeats),
        answer_tokens=given.tokens,
    )  # fmt: skip
    prompts = list(copy_prompts(agreement_of(model), plan, seed=given.seed))
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for turn in range(1 + given.repeats):
        own = prompts[turn * count : (turn + 1) * count]
        for side in SIDES if turn % 2 else SIDES[::-1]:
            played = play(engine, own, side, given.tokens)
            if turn:
                found[side].append(played)
    row: dict[str, Any] = {"requests": count, "share": share}
    for way, plays in found.items():
        row[way] = {name: median(one[name] for one in plays) for name in plays[0]}
    row["auto_over_head"] = row["auto"]["tokens_per_second"] / row["head"]["tokens_per_second"]
    print(
        f"{count:4d} requests, {share:4.0%} copied: auto "
        f"{row['auto']['tokens_per_second']:8.0f} tokens/s, head "
        f"{row['head']['tokens_per_second']:8.0f}, {row['auto_over_head']:.2f}x; copied "
        f"{row['auto']['copied_share']:.0%}, finding copies "
        f"{row['auto']['copy_microseconds_per_round']:.0f} us a round",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", default="1,16,64")
    parser.add_argument("--shares", default="0.5,0")
    parser.add_argument("--length", type=int, default=48, help="tokens of a copied span")
    parser.add_argument("--tokens", type=int, default=512, help="of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    counts = [int(word) for word in given.requests.split(",")]
    options = EngineOptions(
        speculate="auto", device=given.device, max_running_requests=max(counts),
        max_model_len=4 * given.tokens, prefix_caching=False,
    )  # fmt: skip
    engine = Engine(given.model, options=options)
    for note in engine.notes:
        print(f"note: {note}")
    rows = [
        contest(engine, given.model, given, count, float(share))
        for count in counts
        for share in given.shares.split(",")
    ]
    device = engine.model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    document = {
        "rows": rows, "device": name, "torch": torch.__version__, "tokens": given.tokens,
        "length": given.length, "repeats": given.repeats,
    }  # fmt: skip
    if given.out:
        given.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
