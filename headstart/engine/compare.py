"""With and without drafts, on one engine: both speeds, and whether the texts are the same."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from headstart.data.prompt_reader import Prompt
from headstart.engine.engine import Engine
from headstart.engine.scheduler import Work
from headstart.sampling.params import SamplingParams

_REPEATS = 2


@dataclass(frozen=True)
class Divergence:
    """The first place where the two texts differ, and how close the decision was."""

    position: int
    plain_token: int
    drafted_token: int
    logit_gap: float


@dataclass(frozen=True)
class Comparison:
    plain_tokens_per_second: float
    drafted_tokens_per_second: float
    num_tokens: int
    cumulative_acceptance: list[float]
    acceptance_length: float
    divergence: Divergence | None
    text: str

    @property
    def speed_up(self) -> float:
        return self.drafted_tokens_per_second / self.plain_tokens_per_second

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "speed_up": self.speed_up, "equal": self.divergence is None}

    def describe(self) -> str:
        depths = " / ".join(f"{rate:.2f}" for rate in self.cumulative_acceptance) or "no drafts"
        lines = [
            self.text,
            "",
            f"without drafts   {self.plain_tokens_per_second:8.1f} tokens/s",
            f"with drafts      {self.drafted_tokens_per_second:8.1f} tokens/s",
            f"speed-up         {self.speed_up:8.2f}x",
            f"acceptance       {depths} cumulative by depth, length {self.acceptance_length:.2f}",
        ]
        if self.divergence is None:
            lines.append(f"texts            identical ({self.num_tokens} tokens)")
        else:
            at = self.divergence
            lines.append(
                f"texts            differ from token {at.position} on ({at.plain_token} or "
                f"{at.drafted_token}; the logits are {at.logit_gap:.2g} apart)"
            )
        return "\n".join(lines)


def compare_runs(engine: Engine, prompt: Prompt, params: SamplingParams) -> Comparison:
    """Answer alternately without and with drafts; the seed is the same for all."""
    params = replace(params, seed=params.seed if params.seed is not None else 0)
    plain = replace(params, speculate=0)
    seconds: dict[str, list[float]] = {"plain": [], "drafted": []}
    answers: dict[str, Any] = {}
    for name in ("plain", "drafted") * _REPEATS:
        engine.pool.drop_cache()  # a cached prompt would favour whoever runs second
        started = time.perf_counter()
        (result,) = engine.generate([prompt], plain if name == "plain" else params)
        seconds[name].append(time.perf_counter() - started)
        answers[name] = result
    one, other = answers["plain"].outputs[0], answers["drafted"].outputs[0]
    acceptance = other.stats.acceptance
    return Comparison(
        len(one.token_ids) / min(seconds["plain"]),
        len(other.token_ids) / min(seconds["drafted"]),
        len(one.token_ids),
        acceptance.cumulative,
        acceptance.length,
        _divergence(engine, answers["plain"].prompt_token_ids, one.token_ids, other.token_ids),
        one.text,
    )


def _divergence(
    engine: Engine, prompt: list[int], plain: list[int], drafted: list[int]
) -> Divergence | None:
    pairs = list(zip(plain, drafted, strict=False))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return None
    logits = _next_logits(engine, prompt + plain[:at])
    gap = float((logits[plain[at]] - logits[drafted[at]]).abs())
    return Divergence(at, plain[at], drafted[at], gap)


@torch.inference_mode()
def _next_logits(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """Logits after `tokens`, from one pass of the trunk."""
    engine.add(tokens, SamplingParams(temperature=0, max_tokens=1), request_id="divergence")
    (work,) = engine.scheduler.plan()
    _, logits = engine.runner.trunk([Work(work.request, work.start, work.count, ())])
    engine.abort("divergence")
    return logits[-1]
