"""What a request may ask, and what is refused with which words."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from headstart.errors import ConfigError
from headstart.sampling.params import SamplingParams

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, r"temperature is -0\.1; give a number from 0 to 100"),
    ({"temperature": float("nan")}, "temperature is nan; give"),
    ({"temperature": "1"}, "temperature is '1'; give a number"),
    ({"temperature": 1e-9}, "temperature is 1e-09; give 0 for the most likely token"),
    ({"top_k": -2}, r"top_k is -2; give a whole number from -1 to 2\*\*63 - 1\."),
    ({"top_k": 1.5}, r"top_k is 1\.5; give a whole number"),
    ({"top_p": 0}, r"top_p is 0; give a number above 0, up to 1\."),
    ({"top_p": 1.1}, r"top_p is 1\.1; give"),
    ({"min_p": 1.1}, r"min_p is 1\.1; give a number from 0 to 1"),
    ({"repetition_penalty": 0}, r"repetition_penalty is 0; give a number from 0\.01 to 100"),
    ({"presence_penalty": 3}, "presence_penalty is 3; give a number from -2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty is -3; give"),
    ({"max_tokens": -1}, r"max_tokens is -1; give a whole number from 0 to 2\*\*63 - 1"),
    ({"min_tokens": None}, "min_tokens is None; give"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, max_tokens is 4; give a min_tokens"),
    ({"n": 0}, "n is 0; give"),
    ({"n": 2**40}, "n is 1099511627776; give a whole number from 1 to 65536"),
    ({"top_k": 2**63}, "top_k is 9223372036854775808; give a whole number from -1 to"),
    ({"top_k": 10**400}, r"top_k is about 2\*\*1328; give"),
    ({"temperature": 10**400}, r"temperature is about 2\*\*1328; give"),
    ({"stop_token_ids": (10**400,)}, r"stop_token_ids holds about 2\*\*1328; give token ids"),
    ({"n": True}, "n is True; give a whole number"),
    ({"seed": 2**64}, "seed is 18446744073709551616; give"),
    ({"logprobs": -1}, "logprobs is -1; give"),
    ({"logprobs_mode": "cooked"}, "logprobs_mode is 'cooked'; give one of raw, processed"),
    ({"acceptance": "typical"}, "acceptance is 'typical'; give one of match, rejection"),
    ({"speculate": -1}, "speculate is -1; give a number of draft tokens, or `auto`"),
    ({"speculate": "many"}, "speculate is 'many'; give"),
    ({"logit_bias": {3: 101}}, "logit_bias of token 3 is 101; give a number from -100 to 100"),
    ({"logit_bias": {"3": 1}}, "logit_bias holds '3'; give token ids, 0 to 2"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids holds -1; give token ids"),
    ({"stop": ("",)}, "stop holds ''; give texts"),
    ({"allowed_token_ids": ()}, "allowed_token_ids has 0 ids and none is left"),
    ({"allowed_token_ids": (1,), "banned_token_ids": (1, 2)}, "has 1 ids and none is left"),
    ({"ignore_eos": 1}, "ignore_eos is 1; give true or false"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda v: str(v)[:40])
def test_a_value_that_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**fields)


def test_one_stop_text_may_be_given_without_a_tuple() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_no_stops_may_be_given_as_none() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None)
    assert params == SamplingParams()


def test_a_bias_is_copied() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 3.0
    assert params.logit_bias == {1: 2.0}


@pytest.mark.parametrize(
    ("fields", "is_plain", "needs_history"),
    [
        ({}, True, False),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, True, False),
        ({"temperature": 0.5}, False, False),
        ({"repetition_penalty": 1.1}, False, True),
        ({"presence_penalty": 1}, False, True),
        ({"frequency_penalty": 1}, False, True),
        ({"min_tokens": 1}, False, True),
        ({"logit_bias": {1: 1.0}}, False, False),
        ({"allowed_token_ids": (1,)}, False, False),
        ({"banned_token_ids": (1,)}, False, False),
        ({"banned_token_ids": ()}, True, False),
    ],
    ids=str,
)
def test_what_is_plain_greedy_and_what_needs_history(
    fields: dict[str, Any], is_plain: bool, needs_history: bool
) -> None:
    params = SamplingParams(**{"temperature": 0, **fields})
    assert params.is_plain_greedy == is_plain
    assert params.needs_history == needs_history


def test_ids_outside_the_vocabulary_are_refused() -> None:
    SamplingParams(stop_token_ids=(9,)).check_token_ids(10)
    with pytest.raises(ConfigError, match="logit_bias holds 10; the model has tokens 0 to 9"):
        SamplingParams(logit_bias={10: 1.0}).check_token_ids(10)


def test_every_field_has_help() -> None:
    for field in dataclasses.fields(SamplingParams):
        assert field.metadata["help"], field.name


def test_params_do_not_import_torch() -> None:
    code = "import sys, headstart.sampling.params; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
