"""Every setting of a request runs at full speed: in device rounds, and in compiled calls on a CPU.

A field that is new must be named in `support/sampling_examples.py`, with a value that matters.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from inspect import signature
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_runs import ids_of
from support.kernel_runs import SIZES
from support.long_runs import unless_long
from support.sampling_examples import EXAMPLES, TOGETHER, VOCAB, WARM
from support.tiny_fixture import Tiny

from headstart.backends.chooser import Chooser
from headstart.engine.engine import Engine
from headstart.engine.options import Speculate
from headstart.sampling.params import SamplingParams
from headstart.sampling.restrictions import Restrictions
from headstart.vocab.draft_vocab import DraftVocab

PROMPTS = [[3, 4, 5, 6], [5, 20, 31]]
BACKENDS = {
    "cuda": {"kernels": "on", "device": "cpu"},
    "numba": {"device": "cpu"},
}


class Thirds:
    """A grammar: tokens of three classes take turns."""

    def __init__(self, state: int = 0):
        self.state = state

    def allowed(self) -> torch.Tensor:
        return torch.arange(VOCAB) % 3 == self.state % 3

    def accept(self, token: int) -> bool:
        fits = token % 3 == self.state % 3
        self.state += fits
        return fits

    def fork(self) -> Thirds:
        return Thirds(self.state)


# Of a request, beside its settings: every option of `generate`.
OPTIONS: dict[str, Any] = {
    "grammar": Thirds(), "priority": 3, "cache_salt": "own", "request_id": None,
}  # fmt: skip
NUMBA = "headstart.backends.numba."


@pytest.fixture(scope="module")
def folder(tiny: Tiny) -> Path:
    return tiny("mimo", rate=0.9, seed=1, dtype="F32", **SIZES)


def start(folder: Path, **settings: Any) -> Engine:
    vocabs = [
        DraftVocab(ids=tuple(range(0, VOCAB, 2)), name="small"),
        DraftVocab(ids=tuple(range(VOCAB - 4)), name="large"),
    ]
    usual: dict[str, Any] = {
        "dtype": "float32", "speculate": 1, "block_size": 4, "kv_bytes": 1 << 21, "threads": 1,
    }  # fmt: skip
    if settings.get("speculate") != 0:  # there is a head
        usual["draft_vocab"] = vocabs
    return Engine(folder, **{**usual, **settings})


def params_of(settings: dict[str, Any]) -> SamplingParams:
    usual = {"temperature": 0, "max_tokens": 3, "ignore_eos": True, "seed": 5, "detokenize": False}
    return SamplingParams(**{**usual, **settings})


def test_every_field_is_named() -> None:
    named = [name for names in EXAMPLES for name in names]
    assert sorted(named) == sorted(field.name for field in fields(SamplingParams))
    own = {"self", "prompts", "params", "chat_template_kwargs"}
    assert set(signature(Engine.generate).parameters) == own | OPTIONS.keys()


def num_compiled() -> int:
    """Variants of functions that numba has compiled or loaded in this process."""
    modules = [module for name, module in sys.modules.items() if name.startswith(NUMBA)]
    values = [value for module in modules for value in vars(module).values()]
    kernels = {id(value): value for value in values if hasattr(value, "nopython_signatures")}
    return sum(len(kernel.nopython_signatures) for kernel in kernels.values())


def refused(*_: Any, **__: Any) -> Any:
    raise AssertionError("a token is chosen by the sampling package")


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_no_setting_leaves_the_fast_path(
    backend: str, folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything compiled on a CPU when the first request that asks for it comes."""
    pytest.importorskip({"cuda": "triton", "numba": "numba"}[backend])
    if backend == "cuda":
        request.getfixturevalue("quick_kernels")
    engine, plain = start(folder, **BACKENDS[backend]), start(folder, device="cpu", kernels="off")
    assert (engine.backend.name, plain.backend.name) == (backend, "torch")
    each = [params_of(own) for own in (*EXAMPLES.values(), TOGETHER)]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(each))]
    held = [params_of(own) for own in (WARM, {**TOGETHER, "draft_from": "context"})]
    wanted = ids_of(plain.generate(prompts, each)), ids_of(plain.generate(PROMPTS, held, **OPTIONS))
    for name in ("choose", "choose_drafts", "draft_probs", "reject", "logprobs"):
        monkeypatch.setattr(Chooser, name, refused)
    before = num_compiled()
    found = (
        ids_of(engine.generate(prompts, each)),
        ids_of(engine.generate(PROMPTS, held, **OPTIONS)),
    )
    assert found == wanted
    for more in ({}, {"draft_from": "context"}):
        rejecting = params_of({**TOGETHER, "acceptance": "rejection", **more})
        assert len(ids_of(engine.generate(PROMPTS, rejecting))) == len(PROMPTS)
    assert engine.stats.slow_rounds == {} and engine.stats.fast_rounds > len(each)
    assert num_compiled() == before
    assert plain.stats.fast_rounds == 0 and sum(plain.stats.slow_rounds.values()) > len(each)


# Few tokens that are penalised as soon as they were written, if only as drafts of the same round;
# answers of different lengths, so that requests change their places.
REPEATING: list[dict[str, Any]] = [
    {
        **WARM, "allowed_token_ids": (5, 9, 20, 33), "presence_penalty": 1.5,
        "frequency_penalty": 1.0, "repetition_penalty": 1.4, "seed": seed, "max_tokens": 3 + seed,
    }
    for seed in range(6)
]  # fmt: skip
PAIRED = [
    {**first, **second}
    for first, second in combinations([own for own in EXAMPLES.values() if "n" not in own], 2)
]


@pytest.mark.parametrize("speculate", unless_long([2], [0, 1, 2, 3, 4, 5, "auto"]))
@pytest.mark.usefixtures("quick_kernels")
def test_no_settings_together_make_the_text_depend_on_the_number_of_drafts_in_rounds(
    speculate: Speculate, folder: Path
) -> None:
    """The acceptance rule is left out: with `rejection` the text may depend on drafts."""
    pytest.importorskip("triton")
    usual: dict[str, Any] = {"speculate": None, "acceptance": "match"}
    if speculate == 0:
        usual |= {"draft_vocab": None, "draft_from": "auto"}
    some = unless_long(PAIRED[::29], PAIRED)
    each = [params_of({**own, **usual}) for own in (TOGETHER, *some, *REPEATING)]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(each))]
    rounds = start(folder, **BACKENDS["cuda"], speculate=speculate)
    plain = start(folder, device="cpu", kernels="off")
    assert ids_of(rounds.generate(prompts, each)) == ids_of(plain.generate(prompts, each))
    assert not rounds.stats.slow_rounds


@pytest.mark.parametrize("backend", unless_long(["numba"], list(BACKENDS)))
def test_lists_of_tokens_are_converted_once_per_request(
    backend: str, folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the first token, for rounds behind it, for drafts and for all samples together."""
    pytest.importorskip({"cuda": "triton", "numba": "numba"}[backend])
    if backend == "cuda":
        request.getfixturevalue("quick_kernels")
    engine, made = start(folder, **BACKENDS[backend]), list[Restrictions]()

    class Counted(Restrictions):
        def __init__(self, *lists: Any):
            super().__init__(*lists)
            made.append(self)

    monkeypatch.setattr("headstart.sampling.restrictions.Restrictions", Counted)
    lists = {"logit_bias": {5: 1.0}, "allowed_token_ids": tuple(range(0, VOCAB, 2))}
    each = [params_of({**WARM, **lists, "n": 2, "logprobs": 1}) for _ in PROMPTS]
    engine.generate(PROMPTS, each)
    assert len(made) == len(PROMPTS)
