"""What an answer says of drafting where a request asks for it: origins of tokens, statistics."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from headstart.data.detokenizer import Detokenizer
from headstart.engine.output import Completion, Result, Update
from headstart.sampling.acceptance import Acceptance


class OriginText:
    """Splits the text of one sample by tokens.

    Text that waits (it may begin a stop string) belongs to tokens of an earlier chunk: such
    chunks carry origins only.
    """

    def __init__(self, tokenizer: Any, *, skip_special: bool):
        self._text = Detokenizer(tokenizer, (), skip_special=skip_special, keep_stop=True)

    def of(self, update: Update | Completion) -> dict[str, Any]:
        texts = []
        for token in update.token_ids:
            before = len(self._text.text)
            self._text.add(token)
            texts.append(self._text.text[before:])
        shown: dict[str, Any] = {"origins": list(update.origins)}
        if "".join(texts) == update.text:
            shown["token_texts"] = texts
        return shown


def statistics_of(results: Sequence[Result]) -> dict[str, Any]:
    """What drafting gave, all samples together; the words of the engine's own counters."""
    outputs = [output for result in results for output in result.outputs]
    total = Acceptance()
    for output in outputs:
        total.add(output.stats.acceptance)
    firsts = [o.stats.first_token_seconds for o in outputs if o.stats.first_token_seconds]
    return {
        "draft_tokens": sum(total.drafted),
        "accepted_tokens": sum(total.accepted),
        "copied_draft_tokens": sum(output.stats.copied_drafts for output in outputs),
        "copied_accepted_tokens": sum(output.stats.copied_accepted for output in outputs),
        "draft_tokens_per_depth": list(total.drafted),
        "accepted_per_depth": list(total.accepted),
        "tried_per_depth": list(total.tried),  # of the drafts: all before them were accepted
        "rounds": total.rounds,
        "acceptance_length": total.length,
        "chosen_k": _usual_k(total),
        "time_to_first_token_seconds": min(firsts, default=None),
        "tokens_per_second": _speed(outputs),
        "cached_tokens": sum(result.num_cached_tokens for result in results),
        "seed": results[0].stats.seed,
        "seeds": [result.stats.seed for result in results],  # of each prompt's first answer
        "draft_vocab": results[0].stats.draft_vocab,
    }


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
