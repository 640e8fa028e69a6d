"""Prompts that a calibrated trunk repeats spans of: known copy lengths, and a known share.

The trunk goes around a cycle of tokens whatever came before, so what it will write is known. A
prompt that holds spans of that text, in another order, is one that the trunk then repeats them
from; one with spans of another part of the cycle is one that it copies nothing from.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headstart.calibrate.agreement import Agreement
from headstart.errors import ConfigError

FILE_NAME = "copy_prompts.jsonl"
_PLAIN_SHARE = 0.5  # of prompts that nothing is copied from: as long as those with half


@dataclass(frozen=True, kw_only=True)
class CopyPlan:
    """How much of each answer stands in its prompt, in spans of how many tokens."""

    length: int
    share: float
    prompts: int = 64
    answer_tokens: int = 512

    def __post_init__(self) -> None:
        if not 4 <= self.length <= self.answer_tokens:
            raise ConfigError(
                f"--copy-length is {self.length}; give 4 to {self.answer_tokens} (--copy-tokens)."
            )
        if not 0 <= self.share <= 1:
            raise ConfigError(f"--copy-share is {self.share}; give a share from 0 to 1.")
        if self.prompts < 1:
            raise ConfigError(f"--copy-prompts is {self.prompts}; give at least 1.")

    @property
    def starts(self) -> list[int]:
        """Where in an answer the spans begin that its prompt holds: evenly spread."""
        count = round(self.share * self.answer_tokens / self.length)
        step = self.answer_tokens / max(1, count)
        return [int(number * step) for number in range(count)]


@dataclass(frozen=True)
class CopyPrompt:
    """Token ids of a prompt, and what the trunk writes after it."""

    ids: list[int]
    answer: list[int]
    num_copied: int  # tokens of the answer that stand in the prompt


def copy_prompts(agreement: Agreement, plan: CopyPlan, *, seed: int) -> Iterator[CopyPrompt]:
    """One prompt after another, each with an answer of its own."""
    cycle = _cycle(agreement)
    if 2 * plan.answer_tokens > len(cycle):
        raise ConfigError(
            f"answers of {plan.answer_tokens} tokens (--copy-tokens) need a cycle of twice as many "
            f"tokens, found {len(cycle)} (--active). Give shorter answers, or more tokens."
        )
    numbers = random.Random(seed)
    for _ in range(plan.prompts):
        at = numbers.randrange(len(cycle))
        following = [cycle[(at + i) % len(cycle)] for i in range(plan.answer_tokens + 1)]
        answer = following[1:]
        starts, text = plan.starts, answer
        if not starts:  # spans of the other half of the cycle
            starts = CopyPlan(length=plan.length, share=_PLAIN_SHARE,
                              answer_tokens=plan.answer_tokens).starts  # fmt: skip
            far = at + len(cycle) // 2
            text = [cycle[(far + i) % len(cycle)] for i in range(plan.answer_tokens)]
        spans = [text[start : start + plan.length] for start in starts]
        numbers.shuffle(spans)
        ids = [*(token for span in spans for token in span), following[0]]
        yield CopyPrompt(ids, answer, sum(map(len, spans)) if plan.share else 0)


def _cycle(agreement: Agreement) -> list[int]:
    """All tokens that the trunk writes, in their order."""
    following = agreement.following.tolist()
    first = following[0]
    cycle, token = [first], following[first]
    while token != first:
        cycle.append(token)
        token = following[token]
    return cycle


def prompt_lines(agreement: Agreement, plan: CopyPlan, *, seed: int) -> str:
    """A file of prompts in words of the made tokenizer."""
    category = f"copied {plan.share:g}"
    lines: list[dict[str, Any]] = [
        {"id": f"copy-{number}", "category": category, "prompt": " ".join(f"t{i}" for i in one.ids)}
        for number, one in enumerate(copy_prompts(agreement, plan, seed=seed))
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)
