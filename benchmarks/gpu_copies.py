"""Drafts from the context beside the head, on one GPU: `auto` against the head alone.

PYTHONPATH=. python3 benchmarks/gpu_copies.py MODEL [--requests 1,16,64] [--shares 0.5,0]
    [--lengths 64] [--out F]

MODEL is a calibrated checkpoint, written first where there is none (MiMo-7B's shape): its trunk
goes around a cycle of tokens, so prompts can hold spans of what it will write (`headstart
calibrate --copy-length`). `--rate`: how often a draft of the head is right; checkpoints of other
rates differ in their embedding only, which is exchanged. One engine with `auto` answers prompts of
which that share stands in the prompt, by requests that leave the choice to it and by requests that
draft from the head alone, in turns; the first turns warm up and capture. Every answer is checked
against the cycle. Shown besides: how many tokens were copied, what indexing prompts took the host
per token that was read, what finding copies took it per round, which runs while the device works,
and what going on with them takes the device. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from headstart.calibrate.agreement import make_agreement
from headstart.calibrate.calibrated import active_ids, agreement_of, write_calibrated
from headstart.calibrate.copy_prompts import CopyPlan, CopyPrompt, copy_prompts
from headstart.checkpoint.provenance import read_provenance
from headstart.engine.engine import Engine
from headstart.engine.options import EngineOptions
from headstart.sampling.params import SamplingParams

SIDES: tuple[Literal["auto", "head"], ...] = ("auto", "head")
_WARM = 2  # turns that are not counted
_ROWS = 8192  # of the embedding, exchanged at a time
_LAUNCHES = 50  # of one kernel, timed together


def become(engine: Engine, model: Path, rate: float) -> None:
    """Be the checkpoint of another rate, which has the same trunk and head."""
    facts = read_provenance(model)
    if facts["rate"] == rate:
        return
    embed = engine.model.trunk.embed
    agreement = make_agreement(
        *embed.shape, rate=rate, seed=facts["seed"], active=active_ids(facts)
    )
    with torch.inference_mode():
        for start in range(0, len(embed), _ROWS):
            stop = min(start + _ROWS, len(embed))
            embed[start:stop].copy_(agreement.embedding_rows(start, stop))


def capture_seconds(engine: Engine) -> float:
    """What compiling and capturing rounds has taken so far."""
    device: Any = None if engine.loop.rounds is None else engine.loop.rounds._device
    return 0.0 if device is None else sum(device.graphs.new_seconds.values())


def play(
    engine: Engine, prompts: list[CopyPrompt], side: Literal["auto", "head"], tokens: int
) -> dict[str, float]:
    """All prompts at once: tokens per second, and what indexing prompts and finding copies took."""
    params = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, draft_from=side, detokenize=False
    )
    sources = engine.loop.sources
    assert sources is not None
    engine.pool.drop_cache()
    before, rounds = sources.copy_seconds, engine.stats.rounds.total()
    indexing, read = sources.index_seconds, engine.stats.prompt_tokens
    copied, new = engine.stats.copied_accepted, capture_seconds(engine)
    started = time.perf_counter()
    results = engine.generate([one.ids for one in prompts], [params] * len(prompts))
    seconds = time.perf_counter() - started
    for result, one in zip(results, prompts, strict=True):
        assert result.outputs[0].token_ids == one.answer[:tokens], "not the trunk's cycle"
    made = engine.stats.rounds.total() - rounds  # of all requests
    total = sum(len(result.outputs[0].token_ids) for result in results)
    return {
        "seconds": seconds,
        "tokens_per_second": total / seconds,
        "copy_microseconds_per_round": 1e6 * (sources.copy_seconds - before) * len(prompts) / made,
        "index_microseconds_per_prompt_token": (
            1e6 * (sources.index_seconds - indexing) / (engine.stats.prompt_tokens - read)
        ),
        "copied_share": (engine.stats.copied_accepted - copied) / total,
        "acceptance_length": total / made,
        "capture_seconds": capture_seconds(engine) - new,
    }


def contest(
    engine: Engine, model: Path, given: argparse.Namespace, count: int, share: float, length: int
) -> dict[str, Any]:
    plan = CopyPlan(
        length=length, share=share, prompts=count * (_WARM + given.repeats),
        answer_tokens=given.tokens,
    )  # fmt: skip
    prompts = list(copy_prompts(agreement_of(model), plan, seed=given.seed))
    assert engine.policy is not None
    engine.policy.reset()  # what copies were worth in other texts
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for turn in range(_WARM + given.repeats):
        own = prompts[turn * count : (turn + 1) * count]
        for side in SIDES if turn % 2 else SIDES[::-1]:
            played = play(engine, own, side, given.tokens)
            if turn >= _WARM:
                found[side].append(played)
    row: dict[str, Any] = {"requests": count, "share": share, "length": length}
    for way, plays in found.items():
        row[way] = {name: median(one[name] for one in plays) for name in plays[0]}
        row[way]["capture_seconds"] = sum(one["capture_seconds"] for one in plays)
    # Captures come once in the life of an engine.
    seconds = {
        way: [one["seconds"] - one["capture_seconds"] for one in plays]
        for way, plays in found.items()
    }
    row["auto_over_head"] = sum(seconds["head"]) / sum(seconds["auto"])
    row["ratios"] = [
        head / auto for auto, head in zip(seconds["auto"], seconds["head"], strict=True)
    ]
    row["shapes"] = _shapes(engine)
    row["reason"] = engine.stats.draft_reason
    print(
        f"{count:4d} requests, {share:4.0%} copied in spans of {length}: auto "
        f"{row['auto']['tokens_per_second']:8.0f} tokens/s, head "
        f"{row['head']['tokens_per_second']:8.0f}, {row['auto_over_head']:.3f}x "
        f"({min(row['ratios']):.3f} to {max(row['ratios']):.3f}); copied "
        f"{row['auto']['copied_share']:.0%}, tokens of a round "
        f"{row['auto']['acceptance_length']:.2f} and {row['head']['acceptance_length']:.2f}, "
        f"indexing prompts {row['auto']['index_microseconds_per_prompt_token']:.2f} us a token, "
        f"finding copies "
        f"{row['auto']['copy_microseconds_per_round']:.0f} us a round, new captures "
        f"{row['auto']['capture_seconds']:.1f} and {row['head']['capture_seconds']:.1f} s",
        flush=True,
    )
    return row


def _shapes(engine: Engine) -> list[str]:
    """Passes of rounds in which requests had different numbers of rows, with how often each ran."""
    device: Any = None if engine.loop.rounds is None else engine.loop.rounds._device
    parts = {} if device is None else device.graphs._runs
    return [
        f"{part.count} requests, up to {part.num_drafts + 1} rows each, {part.rows} in all: {runs}"
        for part, runs in parts.items()
        if getattr(part, "rows", 0) and not part.groups
    ]


def kernel_microseconds(engine: Engine) -> float | None:
    """What going on with copies takes the device in a round of all requests."""
    from headstart.backends.cuda.kernels.copies import follow_copies

    if engine.loop.rounds is None or engine.model.device.type != "cuda":
        return None
    device: Any = engine.loop.rounds._device
    batch = device.batch

    def launch() -> None:
        for _ in range(_LAUNCHES):
            follow_copies(
                batch.copies, batch.tokens, batch.pending, batch.lengths, batch.limits, batch.ids,
                batch.made, of_head=3, columns=16,
            )  # fmt: skip

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    began.record()
    graph.replay()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) * 1e3 / _LAUNCHES


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--shape", default="mimo-7b", help="of a checkpoint that is written")
    parser.add_argument("--active", type=int, default=32000, help="its tokens in use")
    parser.add_argument("--rate", type=float, default=0.45, help="at which drafts are right")
    parser.add_argument("--requests", default="1,16,64")
    parser.add_argument("--shares", default="0.5,0")
    parser.add_argument("--lengths", default="64", help="tokens of a copied span, several in turn")
    parser.add_argument("--tokens", type=int, default=512, help="of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", default="auto", choices=["auto", "on", "off"])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    counts = [int(word) for word in given.requests.split(",")]
    began = time.perf_counter()
    if not given.model.exists():
        write_calibrated(given.shape, given.rate, given.model, active=given.active)
        print(f"wrote {given.model} in {time.perf_counter() - began:.0f} s", flush=True)
    began = time.perf_counter()
    options = EngineOptions(
        speculate="auto", device=given.device, max_running_requests=max(counts),
        max_model_len=4 * given.tokens, prefix_caching=False, kernels=given.kernels,
        dtype=given.dtype,
    )  # fmt: skip
    engine = Engine(given.model, options=options)
    become(engine, given.model, given.rate)
    print(f"started in {time.perf_counter() - began:.0f} s", flush=True)
    for note in engine.notes:
        print(f"note: {note}")
    costs = engine.policy.uniform_costs if engine.policy is not None else None
    passes = [] if costs is None else [[rows, 1e3 * s] for rows, s in costs.table.passes]
    document: dict[str, Any] = {
        "rows": [], "torch": torch.__version__, "rate": given.rate, "tokens": given.tokens,
        "repeats": given.repeats, "pass_milliseconds": passes,
        "follow_copies_microseconds": kernel_microseconds(engine),
    }  # fmt: skip
    print(f"going on with copies: {document['follow_copies_microseconds']} us; passes {passes}")
    device = engine.model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    document["device"] = name
    shares, lengths = map(float, given.shares.split(",")), map(int, given.lengths.split(","))
    for count, share, length in itertools.product(counts, shares, lengths):
        document["rows"].append(contest(engine, given.model, given, count, share, length))
        if given.out:
            given.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
