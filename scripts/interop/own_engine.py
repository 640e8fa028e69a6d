"""Our engine on the prompts that vLLM is given, counted as vLLM counts."""

from __future__ import annotations

from collections.abc import Sequence

import vllm_counters as workload
from vllm_engine import Served

from headstart.engine.engine import Engine
from headstart.engine.output import Result
from headstart.sampling.params import SamplingParams


def params(depth: int) -> SamplingParams:
    """vLLM drafts on behind the last token that was asked for; so many more are asked for here."""
    length = workload.NUM_TOKENS + depth + 1
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)


def generate(
    engine: Engine, depth: int, prompts: list[list[int]] | None = None
) -> Sequence[Result]:
    """Answers to these prompts, or to those of `vllm_counters.py`."""
    return engine.generate(prompts or workload.prompts(engine.model.config.vocab), params(depth))


def served(results: Sequence[Result], depth: int) -> Served:
    outputs = [result.outputs[0] for result in results]
    rounds = [found for output in outputs for found in accepted_by_round(output.origins)]
    accepted = tuple(sum(found > d for found in rounds) for d in range(depth))
    tokens = [output.token_ids[: workload.NUM_TOKENS] for output in outputs]
    return Served(tokens, len(rounds) if depth else 0, accepted)


def accepted_by_round(origins: Sequence[str]) -> list[int]:
    """Drafts accepted in each round that begins before the last token that counts."""
    found, at = [], 1  # the first token comes from the prompt
    while at < workload.NUM_TOKENS:
        end = at
        while origins[end] == "accepted":
            end += 1
        found.append(end - at)
        at = end + 1
    return found
