"""Numbers of a request at the ends of what fits anywhere: each is refused in one line, or answered,
and the requests beside it get what they would have got alone."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import pytest
from support.engine_runs import ids_of
from support.kernel_runs import SIZES
from support.long_runs import IS_LONG
from support.tiny_fixture import Tiny

from headstart.engine.engine import Engine
from headstart.errors import ConfigError, RequestError
from headstart.sampling.params import SamplingParams

BACKENDS = {
    "cuda": {"kernels": "on"},
    "numba": {},
    "torch": {"kernels": "off"},
}
WHOLE = [
    -(10**5000), -(10**400), -(2**63) - 1, -(2**63), -(2**31), -2, -1, 0, 1, 2**31 - 1, 2**31,
    2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**400, 10**5000,
]  # fmt: skip
FRACTIONS = [5e-324, 1e-300, 1e-45, 1e-6, 1 - 2**-53, 1.0, 100.0, 1e308, -1e308, -5e-324]
SPECIAL = [math.nan, math.inf, -math.inf, True, None, "9"]
NUMBERS = [*WHOLE, *FRACTIONS, *SPECIAL]
LISTS = ("allowed_token_ids", "banned_token_ids", "stop_token_ids")
PROMPT = [3, 4, 5, 6]
BESIDE = {"temperature": 0.9, "seed": 5, "max_tokens": 4, "ignore_eos": True}


def numeric_fields() -> list[str]:
    hints = get_type_hints(SamplingParams)
    scalars = [f.name for f in fields(SamplingParams) if f.name not in (*LISTS, "logit_bias")]
    return [n for n in scalars if {int, float} & {hints[n], *getattr(hints[n], "__args__", ())}]


class Extreme(NamedTuple):
    field: str
    value: Any
    own: dict[str, Any]

    @property
    def size(self) -> float:
        return self.value if isinstance(self.value, int | float) else 0


def extremes() -> list[Extreme]:
    numeric = [
        Extreme(name, value, {name: value}) for name in numeric_fields() for value in NUMBERS
    ]
    # A number of answers that is let in is made; 2**16 of them take minutes.
    numbers = [
        one for one in numeric if one.field != "n" or one.value in (None, 1)
        or one.value not in range(2**17)
    ]  # fmt: skip
    listed = [Extreme(name, value, {name: (value, 7)}) for name in LISTS for value in NUMBERS]
    biases = [Extreme("bias", value, {"logit_bias": {9: value}}) for value in NUMBERS]
    biased = [Extreme("biased token", value, {"logit_bias": {value: 1.0}}) for value in NUMBERS]
    return [*numbers, *listed, *biases, *biased]


def params_of(own: dict[str, Any]) -> SamplingParams | None:
    """None where the settings are refused, in one line of words."""
    try:
        return SamplingParams(**{**BESIDE, "max_tokens": 2, "stop_token_ids": (7,), **own})
    except ConfigError as error:
        said = str(error)
        assert said.startswith(error.field or "?") and said.endswith(".") and len(said) < 250
        return None


def ends_of_each(asked: list[Extreme]) -> list[Extreme]:
    """Of all that is let in of a field: the least, the largest, the fraction nearest to zero.

    A small whole number is no extreme.
    """
    found: dict[str, list[Extreme]] = {}
    for one in asked:
        found.setdefault(one.field, []).append(one)
    chosen: list[Extreme] = []
    for own in found.values():
        ends = [min(own, key=lambda one: one.size), max(own, key=lambda one: one.size)]
        nearest = min(own, key=lambda one: abs(one.size) or math.inf)
        ends = [one for one in (*ends, nearest) if one.size not in (-2, -1, 0, 1)]
        chosen += {id(one): one for one in ends}.values()
    return chosen


def test_every_number_is_walked() -> None:
    assert {"top_k", "min_tokens", "max_tokens", "n", "seed", "logprobs", "temperature",
            "top_p", "min_p", "speculate"} <= set(numeric_fields())  # fmt: skip


@pytest.fixture(scope="module")
def folder(tiny: Tiny) -> Path:
    return tiny("mimo", rate=0.9, seed=1, dtype="F32", **SIZES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_extreme_number_is_refused_or_answered(
    backend: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    """Regression: a top_k of 2**63 ended every open answer on a CPU."""
    pytest.importorskip({"cuda": "triton", "numba": "numba", "torch": "torch"}[backend])
    if backend == "cuda":
        request.getfixturevalue("quick_kernels")
    engine = Engine(
        folder, dtype="float32", device="cpu", speculate=1, block_size=4, kv_bytes=1 << 21,
        threads=1, max_model_len=16, **BACKENDS[backend],
    )  # fmt: skip
    assert engine.backend.name == backend
    alone = ids_of(engine.generate([PROMPT], SamplingParams(**BESIDE)))
    asked: list[Extreme] = []
    for one in extremes():
        params = params_of(one.own)
        try:
            if params is not None:
                engine.read(PROMPT, params)
                asked.append(one)
        except (ConfigError, RequestError) as error:
            assert len(str(error)) < 250 and "\n" not in str(error)
    assert len(asked) > 40
    if backend == "cuda" and not IS_LONG:  # interpreted kernels take seconds for all of them
        asked = ends_of_each(asked)
    beside = SamplingParams(**BESIDE)
    answered = [params for one in asked if (params := params_of(one.own)) is not None]
    answers = engine.generate([PROMPT] * (len(answered) + 1), [*answered, beside])
    assert ids_of(answers[-1:]) == alone
    for params, answer in zip(answered, answers, strict=False):
        assert [o.finish_reason for o in answer.outputs] == ["length"] * params.n or any(
            token in (params.stop_token_ids or ()) for o in answer.outputs for token in o.token_ids
        ), params
