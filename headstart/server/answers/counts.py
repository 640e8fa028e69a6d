"""Usage and statistics of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from headstart.engine.stats import Acceptance

if TYPE_CHECKING:  # the log counts, too, and is there before torch is
    from headstart.engine.outputs import Completion, Result


def usage(prompt_tokens: int, completion_tokens: int, num_cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def usage_of(results: Sequence[Result]) -> dict[str, Any]:
    prompt = sum(len(result.prompt_token_ids) for result in results)
    completion = sum(len(output.token_ids) for output in _outputs(results))
    return usage(prompt, completion, cached_tokens(results))


def statistics_of(results: Sequence[Result]) -> dict[str, Any]:
    """What drafting gave, all samples together; the words of the engine's own counters."""
    outputs = _outputs(results)
    total = Acceptance()
    for output in outputs:
        total.add(output.stats.acceptance)
    firsts = [o.stats.first_token_seconds for o in outputs if o.stats.first_token_seconds]
    return {
        "draft_tokens": sum(total.drafted),
        "accepted_tokens": sum(total.accepted),
        "draft_tokens_per_depth": list(total.drafted),
        "accepted_per_depth": list(total.accepted),
        "tried_per_depth": list(total.tried),  # of the drafts: all before them were accepted
        "rounds": total.rounds,
        "acceptance_length": total.length,
        "chosen_k": _usual_k(total),
        "time_to_first_token_seconds": min(firsts, default=None),
        "tokens_per_second": _speed(outputs),
        "cached_tokens": cached_tokens(results),
        "seed": results[0].stats.seed,
        "seeds": [result.stats.seed for result in results],  # of each prompt's first answer
        "draft_vocab": results[0].stats.draft_vocab,
    }


def _outputs(results: Sequence[Result]) -> list[Completion]:
    return [output for result in results for output in result.outputs]


def cached_tokens(results: Sequence[Result]) -> int:
    """Prompt tokens that were not computed; a preempted request may have found them twice."""
    return sum(
        min(result.stats.num_cached_tokens, len(result.prompt_token_ids)) for result in results
    )


def _usual_k(acceptance: Acceptance) -> int:
    """The number of drafts that most rounds had."""
    at_least = [acceptance.rounds, *acceptance.drafted, 0]
    rounds = [more - fewer for more, fewer in pairwise(at_least)]
    return max(range(len(rounds)), key=lambda k: rounds[k])


def _speed(outputs: Sequence[Completion]) -> float | None:
    """Tokens per second behind the first ones; None where nothing came behind them."""
    ended = [o for o in outputs if o.stats.first_token_seconds and o.stats.total_seconds]
    more = sum(len(output.token_ids) - 1 for output in ended)
    seconds = max((o.stats.total_seconds or 0.0 for o in ended), default=0.0) - min(
        (o.stats.first_token_seconds or 0.0 for o in ended), default=0.0
    )
    return more / seconds if more > 0 and seconds > 0 else None
