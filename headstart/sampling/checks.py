"""Which values of `SamplingParams` can be meant: each by itself, together, and for a vocabulary.

Backends count on it: what they hold in 32 or 64 bits fits, and no number is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeGuard, cast

from headstart.errors import ConfigError, some

if TYPE_CHECKING:
    from headstart.sampling.params import SamplingParams

_ID_FIELDS = ("logit_bias", "allowed_token_ids", "banned_token_ids", "stop_token_ids")
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens")
_MOST = (1 << 63) - 1  # what backends count in 64 bits
_MOST_ID = (1 << 31) - 1
_MOST_ANSWERS = 1 << 16  # each is a request of its own


class _Range(NamedTuple):
    """Which numbers a field takes: from `low` to `high`."""

    low: float
    high: float
    is_whole: bool = False
    is_optional: bool = False  # None is a value, too
    is_open: bool = False  # only above `low`


_RANGES = {
    "temperature": _Range(0, 100),
    "top_k": _Range(-1, _MOST, is_whole=True),
    "top_p": _Range(0, 1, is_open=True),
    "min_p": _Range(0, 1),
    "repetition_penalty": _Range(0.01, 100),
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
    "max_tokens": _Range(0, _MOST, is_whole=True, is_optional=True),
    "min_tokens": _Range(0, _MOST, is_whole=True),
    "n": _Range(1, _MOST_ANSWERS, is_whole=True),
    "seed": _Range(-(1 << 63), (1 << 64) - 1, is_whole=True, is_optional=True),
    "logprobs": _Range(0, _MOST, is_whole=True, is_optional=True),
    "prompt_logprobs": _Range(0, _MOST, is_whole=True, is_optional=True),
}


def check(params: SamplingParams, choices: Mapping[str, Collection[str]]) -> None:
    """ConfigError if a value cannot be meant; `choices`: of fields that name one of some."""
    for name, allowed in _RANGES.items():
        _check_number(name, getattr(params, name), allowed)
    for name in _FLAGS:
        if not isinstance(getattr(params, name), bool):
            raise ConfigError(
                f"{name} is {getattr(params, name)!r}; give true or false.", field=name
            )
    for name in _ID_FIELDS:
        _check_ids(name, getattr(params, name) or ())
    for name, own in choices.items():
        if getattr(params, name) not in own:
            raise ConfigError(
                f"{name} is {getattr(params, name)!r}; give one of {', '.join(own)}.",
                field=name,
            )
    _check_combinations(params)


def _check_number(name: str, value: object, allowed: _Range) -> None:
    if value is None and allowed.is_optional:
        return
    low, high = allowed.low, allowed.high
    is_fit = _is_number(value, whole=allowed.is_whole) and low <= value <= high
    if not is_fit or (allowed.is_open and value == low):
        kind = "whole number" if allowed.is_whole else "number"
        most = "2**63 - 1" if high == _MOST else high
        bounds = f"above {low}, up to {most}" if allowed.is_open else f"from {low} to {most}"
        raise ConfigError(f"{name} is {_shown(value)}; give a {kind} {bounds}.", field=name)


def check_vocabulary(params: SamplingParams, num_tokens: int) -> None:
    """ConfigError if an id is outside a vocabulary of `num_tokens`."""
    for name in _ID_FIELDS:
        ids = getattr(params, name) or ()
        if max(ids, default=0) >= num_tokens:
            bad = [i for i in ids if i >= num_tokens]
            raise ConfigError(
                f"{name} holds {some(bad)}; the model has tokens 0 to {num_tokens - 1}. "
                f"Remove those ids or check the tokenizer.",
                field=name,
            )


def _check_combinations(params: SamplingParams) -> None:
    k = params.speculate
    if k is not None and k != "auto" and not (_is_number(k, whole=True) and 0 <= k <= _MOST):
        raise ConfigError(
            f"speculate is {_shown(k)}; give a number of draft tokens, or `auto`.",
            field="speculate",
        )
    if 0 < params.temperature < 1e-6:
        raise ConfigError(
            f"temperature is {params.temperature}; give 0 for the most likely token, or 1e-6 up.",
            field="temperature",
        )
    for token, value in (params.logit_bias or {}).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not -100 <= value <= 100:  # NaN is not, either
            raise ConfigError(
                f"logit_bias of token {token} is {_shown(value)}; give a number from -100 to 100. "
                f"To forbid a token put it into banned_token_ids.",
                field="logit_bias",
            )
    for text in params.stop:
        if not isinstance(text, str) or not text:
            raise ConfigError(
                f"stop holds {text!r}; give texts of at least one character.", field="stop"
            )
    if params.stop and not params.detokenize:
        raise ConfigError(
            "stop texts are looked for in the text; leave detokenize on with them.", field="stop"
        )
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise ConfigError(
            f"min_tokens is {params.min_tokens}, max_tokens is {params.max_tokens}; "
            f"give a min_tokens of at most {params.max_tokens}.",
            field="min_tokens",
        )
    allowed = params.allowed_token_ids
    if allowed is not None and set(params.banned_token_ids or ()).issuperset(allowed):
        raise ConfigError(
            f"allowed_token_ids has {len(allowed)} ids and none is left after banned_token_ids; "
            f"allow at least one token.",
            field="allowed_token_ids",
        )


def _check_ids(name: str, ids: Collection[object]) -> None:
    if not ids:
        return
    if set(map(type, ids)) == {int}:  # a list may hold a whole vocabulary
        numbers = cast(Collection[int], ids)
        if 0 <= min(numbers) <= max(numbers) <= _MOST_ID:
            return
    bad = [i for i in ids if not (_is_number(i, whole=True) and 0 <= i <= _MOST_ID)]
    if bad:
        raise ConfigError(
            f"{name} holds {some(map(_shown, bad))}; give token ids, 0 to 2**31 - 1.", field=name
        )


def _is_number(value: object, *, whole: bool) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return False
    return isinstance(value, int) or math.isfinite(value)


def _shown(value: object) -> str:
    """For messages: Python refuses to write out a whole number of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"about {'-' if value < 0 else ''}2**{value.bit_length() - 1}"
    return repr(value)
