"""The engine on a GPU with hardly any memory: texts and log-probabilities of the CPU's engine.

python scripts/gpu_pressure.py [--device cuda] [--variants mimo,qwen3_next,deepseek_v32]
    [--requests 60] [--drafts 3,0,copies] [--rows 24]

Requests with beginnings in common come while others decode, and some leave in the middle. There is
memory for two of the longest, so that blocks and states are taken away, found again by later
requests, and computed anew. Every answer, or what there was of it, must be that of the CPU's engine
without drafts, in float32; log-probabilities say that states and K/V behind a hit are those of a
computation. copies: every copy that there is, right or wrong, beside one draft of the head;
prompts end as they begin, so that there is much to copy that is wrong, and the second half of the
requests asks what the first did, whose answers can be copied. It asks for no log-probabilities,
since beside those all requests of a captured round have as many rows. In the end
all memory must be free. Exits 1 if anything differs, or if no request lost its memory, none was
found, or none left; beside copies also if none was right, or none wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from gpu_check import OWN, VARIANTS, take_all

from headstart.calibrate.tiny import write_tiny
from headstart.engine.engine import Engine
from headstart.engine.memory import plan_memory
from headstart.engine.output import Completion
from headstart.errors import EngineError
from headstart.sampling.params import SamplingParams

Drafts = int | Literal["copies"]
_BLOCK, _TOKENS = 4, 40
_LONGEST = 40  # tokens of a prompt, at most
_AGAIN = 4  # tokens of a prompt that come twice where copies are drafted,
_ANSWERS = 64  # and answers that later ones may copy from
_HELD, _RUNNING = 2, 6  # requests that there is memory for, and that may run
# States as small as blocks, or there would always be blocks for all requests that have one.
_STATES = {
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}  # fmt: skip
_SMALL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _STATES),
    "bailing_moe_v3": {"head_dim": 16},
}
COUNTED = ("preemptions", "cached_tokens", "aborted")
_TOLERANCE = 2e-3  # of log-probabilities: sums in another order


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    params: SamplingParams
    stays: int | None  # steps after which it leaves


def traffic(count: int, seed: int = 0) -> list[Asked]:
    """Prompts with beginnings in common and ends of their own."""
    draw = random.Random(seed)
    stems = [[draw.randrange(2, 90) for _ in range(length)] for length in (6, 17, 30)]
    stems.append(stems[2][:19] + stems[0])
    asked = []
    for number in range(count):
        tail = [draw.randrange(2, 90) for _ in range(draw.randrange(7))]
        heat = draw.choice((0.0, 0.9))
        params = SamplingParams(
            temperature=heat, seed=number, max_tokens=draw.randint(4, _TOKENS), ignore_eos=True,
            logprobs=0,
        )  # fmt: skip
        stays = draw.randrange(1, 16) if draw.random() < 0.2 else None
        asked.append(Asked((*draw.choice(stems), *tail), params, stays))
    return asked


def to_copy_from(asked: Sequence[Asked]) -> list[Asked]:
    """The first half of these, with prompts that end as they begin, and then the same again."""
    first = [
        replace(one, prompt=(*one.prompt, *one.prompt[:_AGAIN]))
        for one in asked[: -(-len(asked) // 2)]
    ]
    again = [replace(one, params=replace(one.params, logprobs=None), stays=None) for one in first]
    return [*first, *again[: len(asked) - len(first)]]


def small(folder: Path, device: str, drafts: Drafts, rows: int, kernels: Any) -> Engine:
    """An engine whose memory holds two requests of the longest, and some states."""
    options: dict[str, Any] = {
        "device": device, "dtype": "float32", "block_size": _BLOCK,
        "speculate": "auto" if drafts == "copies" else drafts,
        "draft_from_answers": _ANSWERS if drafts == "copies" else 0,
        "max_running_requests": _RUNNING, "max_batched_tokens": rows, "max_model_len": 128,
        "kernels": kernels,
    }  # fmt: skip
    wide = Engine(folder, kv_bytes=1 << 26, **options)
    blocks = _HELD * -(-(_LONGEST + _TOKENS) // _BLOCK)
    room = 1 << 12
    while True:  # states have a share of it, so it is not simply a product
        try:
            planned = plan_memory(wide.memory.needs, replace(wide.options, kv_bytes=room)).cache
        except EngineError:  # too little for a block or a state
            planned = None
        if (
            planned is not None
            and planned.num_blocks >= blocks
            and (
                planned.num_states == 0
                or planned.num_states >= _RUNNING + wide.options.usual_drafts
            )
        ):
            break
        room = int(room * 1.05) + 1
    del wide
    engine = Engine(folder, kv_bytes=room, **options)
    if drafts == "copies" and engine.policy is not None:
        take_all(engine.policy)
    return engine


def run(engine: Engine, asked: Sequence[Asked], seed: int = 0) -> list[Completion]:
    """What each of them got; they come a few at a time."""
    draw, waiting = random.Random(seed), list(enumerate(asked))
    names, leaves = dict[str, int](), dict[str, int]()
    found = dict[int, Completion]()
    step = 0
    while waiting or engine.has_work:
        for number, one in waiting[: draw.choice((0, 1, 2, 4))]:
            name = engine.add(list(one.prompt), one.params)
            names[name] = number
            if one.stays is not None:
                leaves[name] = step + one.stays
            waiting.pop(0)
        ended = [u.request_id for u in engine.step() if u.finish_reason is not None]
        engine.scheduler.check()
        for name in [name for name, at in leaves.items() if at <= step and name in names]:
            if name not in ended:
                engine.abort(name)
                ended.append(name)
        for name in ended:
            found[names.pop(name)] = engine.collect(name).outputs[0]
        step += 1
    return [found[number] for number in range(len(asked))]


def alone(folder: Path, asked: Sequence[Asked]) -> list[Completion]:
    """The CPU's answers, with memory for all and nothing found."""
    engine = Engine(
        folder, device="cpu", dtype="float32", speculate=0, kernels="off", prefix_caching=False,
        kv_bytes=1 << 27, max_model_len=128,
    )  # fmt: skip
    results = engine.generate([list(a.prompt) for a in asked], [a.params for a in asked])
    return [result.outputs[0] for result in results]


def difference(found: Completion, wanted: Completion) -> str | None:
    """Of an answer that may have been cut short."""
    count = len(found.token_ids)
    whole = found.finish_reason == "abort" or count == len(wanted.token_ids)
    if not whole or found.token_ids != wanted.token_ids[:count]:
        return f"tokens {found.token_ids} instead of {wanted.token_ids}"
    if wanted.logprobs is None:
        return None
    told = found.logprobs or []
    if len(told) != count:
        return f"{len(told)} log-probabilities of {count} tokens"
    pairs = zip(told, wanted.logprobs[:count], strict=True)
    apart = max((abs(one.logprob - other.logprob) for one, other in pairs), default=0.0)
    return f"log-probabilities {apart:.2g} apart" if apart > _TOLERANCE else None


def faults(engine: Engine, found: Sequence[Completion], wanted: Sequence[Completion]) -> list[str]:
    """What is wrong with answers, memory and what was to happen meanwhile."""
    pairs = zip(found, wanted, strict=True)
    wrong = [d for own, other in pairs if (d := difference(own, other)) is not None]
    wrong += [f"no {name}" for name in COUNTED if not getattr(engine.stats, name)]
    if engine.options.speculate == "auto":
        right, made = engine.stats.copied_accepted, engine.stats.copied_drafts
        if not 0 < right < made:
            wrong.append(f"{right} of {made} copied drafts right")
    if engine.pool.num_used:
        wrong.append(f"{engine.pool.num_used} blocks are still held")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernels", default="auto", choices=("auto", "on", "off"))
    parser.add_argument("--variants", default=",".join(v for v in VARIANTS if "*" not in v))
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--drafts", default="3,0,copies")
    parser.add_argument("--rows", type=int, default=24, help="of a pass")
    given = parser.parse_args()
    numbers: list[Drafts] = [
        "copies" if word == "copies" else int(word) for word in given.drafts.split(",")
    ]
    failures = 0
    with tempfile.TemporaryDirectory() as work:
        for variant in given.variants.split(","):
            own = {**OWN.get(variant, {}), **_SMALL.get(variant, {})}
            folder = write_tiny(variant, Path(work) / variant, dtype="F32", **own)
            asked: list[Asked] = []
            for drafts in numbers:
                if not asked or drafts == "copies":
                    asked = traffic(given.requests)
                    if drafts == "copies":
                        asked = to_copy_from(asked)
                    wanted = alone(folder, asked)
                engine = small(folder, given.device, drafts, given.rows, given.kernels)
                wrong = faults(engine, run(engine, asked), wanted)
                names = (*COUNTED, "copied_accepted") if drafts == "copies" else COUNTED
                counts = ", ".join(f"{getattr(engine.stats, name)} {name}" for name in names)
                failures += bool(wrong)
                verdict = f"DIFFERENT: {wrong[0]}" if wrong else "same"
                print(f"{variant:16} {engine.backend.name:5} K={drafts} {counts}: {verdict}",
                      flush=True)  # fmt: skip
                del engine
    name = torch.cuda.get_device_name() if given.device.startswith("cuda") else given.device
    print(f"{failures} failures on {name}, torch {torch.__version__}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
