"""The engine on a GPU against the engine on the CPU: same tokens, whatever is drafted.

python scripts/gpu_check.py [--device cuda] [--variants mimo,qwen3_next,mimo*3] [--mixtures 20]
    [--dtypes float32,bfloat16] [--drafts 0,3,auto,copies,vocab,context]

mimo*3 has three modules; copies: every copy from the context that there is, right or wrong, beside
requests that have none; vocab: the same where the head has a draft vocabulary and own tokens;
context: the same without a head. Every setting by itself, then mixtures of them drawn at random,
every third request under a grammar; prompts are read a few at a time, beside those that decode.
Exits 1 if a token differs in fp64 or fp32; for bf16 it is only said. Beside copies, the rejection
rule (whose texts depend on drafts) must write answers of full length.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch

from headstart.calibrate.tiny import write_tiny
from headstart.copying.drafts import MAX_COPIED, Copy
from headstart.engine.auto.copies import PlannedRound
from headstart.engine.auto.policy import DraftPolicy
from headstart.engine.engine import Engine
from headstart.engine.request import Request
from headstart.sampling.params import SamplingParams
from headstart.vocab.draft_vocab import DraftVocab

VARIANTS = (
    "mimo", "mimo*3", "qwen3", "glm4_moe", "ernie4_5_moe", "qwen3_5_text", "qwen3_next",
    "deepseek_v3", "glm4_moe_lite", "mimo_v2", "step3p5", "mellum", "exaone_moe",
    "deepseek_v32", "glm_moe_dsa", "qwen3_5_moe_text", "bailing_moe_v2", "qwen3_moe",
    # plain modules on GPUs
    "nemotron_h", "bailing_moe_v3", "exaone4_5", "hy_v4", "glm5_next", "qwen4_exp", "deepseek_v4",
)  # fmt: skip
# Windows that answers grow out of, and choices of fewer entries than prompts have.
OWN: dict[str, dict[str, Any]] = {
    "mimo_v2": {"sliding_window_size": 9},
    "step3p5": {
        "sliding_window": 9, "swiglu_limits": [0, 0.05, 0.05, 0, 0, 0],
        "swiglu_limits_shared": [0, 0, 0.1, 0, 0, 0],
    },
    "mellum": {"sliding_window": 9},
    "exaone_moe": {"sliding_window": 9, "sliding_windows": [9, 9, 0]},
    "deepseek_v32": {"index_topk": 12},
    "glm_moe_dsa": {"index_topk": 12, "indexer_types": ["full", "shared", "full"]},
}  # fmt: skip
FIRST = [[3, 4, 5, 6, 7], [9] * 40, list(range(20, 57))]
WARM: dict[str, Any] = {"temperature": 0.8, "seed": 7}
EACH: list[dict[str, Any]] = [
    {"temperature": 0},
    {**WARM, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.1, "min_p": 0.05, "repetition_penalty": 1.2, "seed": 8},
    WARM,
    {**WARM, "top_p": 0.9},
    {**WARM, "top_k": 100},
    {"temperature": 0, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    {**WARM, "logit_bias": {5: 2.0, 9: -4.0}, "banned_token_ids": (3, 4)},
    {**WARM, "allowed_token_ids": tuple(range(2, 40))},
    {**WARM, "min_tokens": 20, "stop_token_ids": tuple(range(30)), "ignore_eos": False},
    {**WARM, "logprobs": 5, "top_p": 0.95},
    {"temperature": 0, "logprobs": 20, "logprobs_mode": "processed"},
]
Drafts = int | Literal["auto", "copies", "vocab", "context"]
COPYING: tuple[Drafts, ...] = ("copies", "vocab", "context")
DRAFTS: tuple[Drafts, ...] = (0, 1, 2, 3, 4, 5, "auto", *COPYING)
GRAMMAR_EVERY = 3  # requests
REJECTING = SamplingParams(max_tokens=40, ignore_eos=True, acceptance="rejection", **WARM)
THIRD = DraftVocab(ids=tuple(range(0, 90, 3)), name="third")
_BATCHED = 96  # rows of a pass: some prompts are read while others decode


class Parity:
    """A grammar without a library: odd and even tokens take turns."""

    def __init__(self, vocab_size: int, parity: int = 0):
        self._ids, self._parity = torch.arange(vocab_size), parity

    def allowed(self) -> torch.Tensor:
        return self._ids % 2 == self._parity

    def accept(self, token: int) -> bool:
        if token % 2 != self._parity:
            return False
        self._parity = 1 - self._parity
        return True

    def fork(self) -> Parity:
        return Parity(len(self._ids), self._parity)


def settings(num_mixtures: int) -> list[SamplingParams]:
    """Each by itself, then several at once; of two that name a field the later one counts."""
    draw = random.Random(0)
    mixed = [
        {name: value for own in draw.sample(EACH, 4) for name, value in own.items()}
        for _ in range(num_mixtures)
    ]
    return [SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **own}) for own in EACH + mixed]


def take_all(policy: DraftPolicy, of_head: int = 1) -> None:
    """Whatever rounds cost: so many drafts of the head, and every copy that there is."""

    def plan_round(
        requests: Sequence[Request], num_running: int, copies: Mapping[Request, Copy]
    ) -> PlannedRound:
        head = {request: min(of_head, policy.room(request)) for request in requests}
        return PlannedRound(head, {r: len(copy.tokens[:MAX_COPIED]) for r, copy in copies.items()})

    def plan(
        requests: Sequence[Request], num_running: int, copies: Mapping[Request, Copy]
    ) -> PlannedRound:
        """For the host, which puts copies behind what the head drafts, right or wrong."""
        planned = plan_round(requests, num_running, copies)
        return replace(planned, head={**planned.head, **dict.fromkeys(copies, 0)})

    patch.multiple(policy, plan=plan, plan_round=plan_round).start()


def to_copy_from(folder: Path, source: str, dtype: str) -> list[list[int]]:
    """Prompts that hold what the model would write, changed here and there, and one without."""
    plain = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * len(FIRST)
    said, _ = answers(folder, source, dtype, 0, plain, FIRST, 0)
    changed = [[t + 1 if i % 9 == 8 else t for i, t in enumerate(own)] for own in said]
    held = [[*begin, *own, *begin] for begin, own in zip(FIRST, changed, strict=True)]
    return [*held, FIRST[-1]]


def answers(
    folder: Path, device: str, dtype: str, drafts: Drafts, params: list[SamplingParams],
    first: Sequence[list[int]], grammar_every: int = GRAMMAR_EVERY,
) -> tuple[list[list[int]], Engine]:  # fmt: skip
    with_vocab = drafts == "vocab"
    engine = Engine(
        folder, device=device, dtype=dtype, kv_bytes=1 << 26,
        speculate="auto" if drafts == "copies" or drafts == "vocab" else drafts,
        draft_vocab=[THIRD] if with_vocab else None, draft_vocab_own=8 if with_vocab else 0,
        max_batched_tokens=_BATCHED, max_running_requests=16,
    )  # fmt: skip
    if drafts in COPYING and engine.policy is not None:
        take_all(engine.policy, of_head=0 if drafts == "context" else 1)
    names = []
    for number, own in enumerate(params):
        has_grammar = grammar_every and number % grammar_every == grammar_every - 1
        grammar = Parity(len(engine.model.trunk.embed)) if has_grammar else None
        names.append(engine.add(first[number % len(first)], own, grammar=grammar))
    while engine.has_work:
        engine.step()
    results = [engine.collect(name) for name in names]
    engine.scheduler.check()
    return [result.outputs[0].token_ids for result in results], engine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--mixtures", type=int, default=20)
    parser.add_argument("--dtypes", default="float64,float32,bfloat16")
    parser.add_argument("--drafts", default=",".join(map(str, DRAFTS)))
    given = parser.parse_args()
    device, params = given.device, settings(given.mixtures)
    numbers: list[Any] = [
        word if word in ("auto", *COPYING) else int(word) for word in given.drafts.split(",")
    ]
    failures = 0
    with tempfile.TemporaryDirectory() as work:
        for variant in given.variants.split(","):
            name, _, modules = variant.partition("*")
            several = dict(OWN.get(name, {}))
            if modules:
                several["num_nextn_predict_layers"] = int(modules)
            folder = write_tiny(name, Path(work) / variant, dtype="F32", **several)
            for dtype in given.dtypes.split(","):
                source = "cpu" if dtype != "bfloat16" else device
                asked = {False: FIRST}
                if any(word in COPYING for word in numbers):
                    asked[True] = to_copy_from(folder, source, dtype)
                reference = {
                    copies: answers(folder, source, dtype, 0, params, own)[0]
                    for copies, own in asked.items()
                }
                for drafts in numbers:
                    copies = drafts in COPYING
                    got, engine = answers(folder, device, dtype, drafts, params, asked[copies])
                    same = got == reference[copies]
                    failures += not same and dtype != "bfloat16"
                    rates: list[Any] = [
                        round(rate, 2) for rate in engine.stats.acceptance.cumulative
                    ]
                    if copies:
                        right, made = engine.stats.copied_accepted, engine.stats.copied_drafts
                        rates = [f"{right} of {made} copied drafts right"]
                        texts, _ = answers(
                            folder, device, dtype, drafts, [REJECTING] * len(params), asked[True]
                        )
                        failures += any(len(text) != 40 for text in texts)
                    verdict = "same" if same else "DIFFERENT"
                    by = engine.backend.name
                    print(f"{variant:12} {dtype:9} {by:5} K={drafts!s:7} {verdict:9} {rates}")
    name = torch.cuda.get_device_name() if device.startswith("cuda") else device
    print(f"{failures} failures on {name}, torch {torch.__version__}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
