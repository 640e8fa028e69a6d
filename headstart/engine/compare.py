"""With and without drafts, on one engine: both speeds, and whether the texts are the same."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from headstart.data.prompt_reader import Prompt
from headstart.engine.engine import Engine
from headstart.models.documents import Documents
from headstart.models.unroll import trunk_states
from headstart.sampling.noise import gumbel
from headstart.sampling.params import Row, SamplingParams, derive_seed
from headstart.sampling.processors import process

_REPEATS = 2


@dataclass(frozen=True)
class Divergence:
    """The first place where the two texts differ, and how close the decision was.

    Gaps are those between the two tokens: of the trunk's raw logits, and of what decided, which is
    processed logits (at a temperature: log-probabilities plus noise). None stands for a decision
    of another kind: the rejection rule, or a token that the sampling settings exclude. A text that
    ends where the other goes on has token None there, and nothing is known of gaps.
    """

    position: int
    plain_token: int | None
    drafted_token: int | None
    logit_gap: float | None
    decision_gap: float | None

    @property
    def reason(self) -> str:
        """What is known of why, in a few words."""
        if self.logit_gap is None:
            return "one ends there"
        decided = "it was decided otherwise"
        if self.decision_gap is not None:
            decided = f"what decided {self.decision_gap:.2g}"
        return f"raw logits are {self.logit_gap:.2g} apart, {decided}"


@dataclass(frozen=True)
class Comparison:
    plain_tokens_per_second: float
    drafted_tokens_per_second: float
    num_tokens: int
    cumulative_acceptance: list[float]
    accepted_per_round: list[float]  # by depth; their sum and 1 are the length
    acceptance_length: float
    copied_tokens: int
    divergence: Divergence | None
    text: str

    @property
    def speed_up(self) -> float:
        return self.drafted_tokens_per_second / self.plain_tokens_per_second

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "speed_up": self.speed_up, "equal": self.divergence is None}

    def describe(self) -> str:
        depths = " / ".join(f"{rate:.2f}" for rate in self.accepted_per_round) or "no drafts"
        lines = [
            self.text,
            "",
            f"without drafts   {self.plain_tokens_per_second:8.1f} tokens/s",
            f"with drafts      {self.drafted_tokens_per_second:8.1f} tokens/s",
            f"speed-up         {self.speed_up:8.2f}x",
            f"accepted         {depths} per round by depth, length {self.acceptance_length:.2f}",
        ]
        if self.copied_tokens:
            lines.append(f"copied           {self.copied_tokens:8} tokens, from the context")
        if self.divergence is None:
            lines.append(f"texts            identical ({self.num_tokens} tokens)")
        else:
            at = self.divergence
            lines.append(
                f"texts            differ from token {at.position} on ({at.plain_token} or "
                f"{at.drafted_token}: {at.reason})"
            )
        return "\n".join(lines)


def compare_runs(engine: Engine, prompt: Prompt, params: SamplingParams) -> Comparison:
    """Answer alternately without and with drafts; the seed is the same for all."""
    params = replace(params, seed=params.seed if params.seed is not None else 0)
    has_head = engine.model.head is not None
    plain = replace(params, speculate=0, draft_from="head" if has_head else "auto")
    seconds: dict[str, list[float]] = {"plain": [], "drafted": []}
    answers: dict[str, Any] = {}
    for name in ("plain", "drafted") * _REPEATS:
        engine.pool.drop_cache()  # a cached prompt would favour the second run
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
        acceptance.per_round,
        acceptance.length,
        other.stats.copied_accepted,
        find_divergence(
            engine, answers["plain"].prompt_token_ids, params, one.token_ids, other.token_ids
        ),
        one.text,
    )


@torch.inference_mode()
def find_divergence(
    engine: Engine, prompt: list[int], params: SamplingParams, plain: list[int], drafted: list[int]
) -> Divergence | None:
    """Where two answers of one seed part, if they do; the trunk is asked once more about it."""
    pairs = zip(plain, drafted, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return _end_of_shorter(plain, drafted)
    before, both = plain[:at], torch.tensor([plain[at], drafted[at]], device=engine.model.device)
    logits = _next_logits(engine, prompt + before)
    raw = logits[0, both]
    row = Row(
        params=params, seed=derive_seed(params.seed or 0, 0), position=len(prompt) + at,
        prompt_ids=prompt, output_ids=before, num_output=at,
        end_ids=engine.admission.ends(params),
    )  # fmt: skip
    values = process(logits, [row])[0, both]
    if not params.is_greedy:
        values = values + gumbel([row.seed], [row.position], both)[0]
    gap = float((values[0] - values[1]).abs())
    is_known = params.acceptance == "match" and math.isfinite(gap)
    return Divergence(
        at, plain[at], drafted[at], float((raw[0] - raw[1]).abs()), gap if is_known else None
    )


def _end_of_shorter(plain: list[int], drafted: list[int]) -> Divergence | None:
    """None if the texts are equal."""
    at = min(len(plain), len(drafted))
    one, other = (tokens[at] if len(tokens) > at else None for tokens in (plain, drafted))
    return None if one is None and other is None else Divergence(at, one, other, None, None)


def _next_logits(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """[1, V] after `tokens`, from one pass of the trunk without K/V memory."""
    trunk, ids = engine.model.trunk, torch.tensor(tokens, device=engine.model.device)
    states = trunk_states(trunk, ids, Documents((len(tokens),)), "after_final_norm")
    return trunk.logits(states[-1:])
