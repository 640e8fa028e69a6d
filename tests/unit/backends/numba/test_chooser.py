"""The compiled chooser is held to the sampling package, over all settings together."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headstart.backends.chooser import Chooser
from headstart.backends.numba import support
from headstart.sampling import noise
from headstart.sampling.choose import NOTHING_ALLOWED
from headstart.sampling.history import History
from headstart.sampling.params import Row, SamplingParams

if support.why_missing() is not None:
    pytest.skip("no numba here", allow_module_level=True)

import numpy as np

from headstart.backends.numba import noise as compiled_noise
from headstart.backends.numba.chooser import CompiledChooser

REFERENCE = Chooser()
SIZES = (5, 64, 97, 1500)
CHOOSERS = {size: CompiledChooser(size) for size in SIZES}
TOKENS = st.integers(0, min(SIZES) - 1)  # in every vocabulary

# Every field that a choice depends on, with what is tried.
CHOICE = {
    "temperature": st.sampled_from([0.0, 0.0, 0.05, 0.7, 1.0, 2.5]),
    "top_k": st.sampled_from([0, -1, 1, 3, 40, 1400, 5000]),
    "top_p": st.sampled_from([1.0, 0.03, 0.37, 0.81, 0.973]),
    "min_p": st.sampled_from([0.0, 0.011, 0.23, 1.0]),
    "repetition_penalty": st.sampled_from([1.0, 0.6, 1.7]),
    "presence_penalty": st.sampled_from([0.0, 0.7, -1.3]),
    "frequency_penalty": st.sampled_from([0.0, 0.4, -0.9]),
    "logit_bias": st.none() | st.dictionaries(TOKENS, st.sampled_from([-50.0, -1.0, 2.5, 100.0])),
    "allowed_token_ids": st.none() | st.lists(TOKENS, min_size=2, max_size=4, unique=True),
    "banned_token_ids": st.none() | st.lists(TOKENS, max_size=1),
    "min_tokens": st.sampled_from([0, 0, 4]),
}
# Log-probabilities, and the rule by which drafts are accepted: below.
TOLD = {"logprobs": st.integers(0, 7), "logprobs_mode": st.sampled_from(["raw", "processed"])}
RULE = {"acceptance"}
# No choice depends on these: where a text ends (min_tokens holds back `Row.end_ids`), how it is
# shown, how many drafts are made among what; the seed that counts is the row's.
OTHERS = {
    "max_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "n", "seed",
    "detokenize", "skip_special_tokens", "speculate", "draft_vocab", "draft_from",
    "prompt_logprobs",
}  # fmt: skip


@st.composite
def rows(draw: st.DrawFn, size: int, extra: dict[str, st.SearchStrategy[Any]]) -> Row:
    params = SamplingParams(**{name: draw(each) for name, each in {**CHOICE, **extra}.items()})
    prompt, output, drafts = (draw(st.lists(TOKENS, max_size=6)) for _ in range(3))
    mask = None
    if draw(st.booleans()):
        mask = torch.rand(size, generator=torch.Generator().manual_seed(draw(TOKENS))) < 0.6
    return Row(
        params, draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 5000)), prompt,
        [*output, *drafts], draw(st.integers(0, 6)), frozenset(draw(st.sets(TOKENS, max_size=2))),
        mask, History.of(prompt, output) if draw(st.booleans()) else None,
    )  # fmt: skip


@st.composite
def batches(draw: st.DrawFn, **extra: st.SearchStrategy[Any]) -> tuple[int, Tensor, list[Row]]:
    """A vocabulary's size, logits (some with many equal values, and zeros of both signs), rows."""
    size = draw(st.sampled_from(SIZES))
    asked = draw(st.lists(rows(size, extra), min_size=1, max_size=4))
    made = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    logits = torch.randn(len(asked), size, generator=made) * draw(st.sampled_from([0.1, 3.0, 9.0]))
    return size, logits.round() if draw(st.booleans()) else logits, asked


@settings(max_examples=120, derandomize=True, deadline=None)
@given(batches())
def test_choices_are_those_of_the_reference(batch: tuple[int, Tensor, list[Row]]) -> None:
    size, logits, asked = batch
    before = logits.clone()
    found = CHOOSERS[size].choose(logits, asked)
    assert found == REFERENCE.choose(logits, asked)
    assert torch.equal(logits, before)
    alone = [CHOOSERS[size].choose(logits[i : i + 1], [row]) for i, row in enumerate(asked)]
    assert [found[i : i + 1] for i in range(len(asked))] == alone


@settings(max_examples=60, derandomize=True, deadline=None)
@given(batches(), st.booleans())
def test_drafts_are_those_of_the_reference(
    batch: tuple[int, Tensor, list[Row]], is_reduced: bool
) -> None:
    size, logits, asked = batch
    ids = torch.arange(0, size, 2) if is_reduced else None
    logits = logits[:, : len(ids)].contiguous() if ids is not None else logits
    own = CHOOSERS[size]
    assert own.choose_drafts(logits, asked, ids) == REFERENCE.choose_drafts(logits, asked, ids)
    probs = own.draft_probs(logits, asked, ids, size)
    wanted = REFERENCE.draft_probs(logits, asked, ids, size)
    dead = wanted.isnan().any(-1)  # no token is allowed
    torch.testing.assert_close(probs[~dead], wanted[~dead], rtol=1e-4, atol=1e-6)
    for i, row in enumerate(asked):
        assert row.mask is None or not probs[i][~row.mask].any() or row.params.is_greedy


@settings(max_examples=60, derandomize=True, deadline=None)
@given(batches(**TOLD), st.data())
def test_log_probabilities_are_those_of_the_reference(
    batch: tuple[int, Tensor, list[Row]], data: st.DataObject
) -> None:
    size, logits, asked = batch
    ids = [data.draw(TOKENS) for _ in asked]
    at = [data.draw(st.integers(0, len(asked) - 1)) for _ in asked]
    found, wanted = (each.logprobs(logits, at, ids, asked) for each in (CHOOSERS[size], REFERENCE))
    for (value, best), (wanted_value, wanted_best) in zip(found, wanted, strict=True):
        if value != value or wanted_value != wanted_value:  # NaN: no token is allowed
            continue
        assert value == pytest.approx(wanted_value, abs=1e-4)
        assert list(best.values()) == pytest.approx(list(wanted_best.values()), abs=1e-4)
        # Cut tokens stand in any order; near ties may change places where sums are rounded.
        for token, other in zip(best, wanted_best, strict=True):
            if best[token] > -1e30 and token != other:
                assert best[token] == pytest.approx(wanted_best.get(token), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_rejection_rule_accepts_nothing_where_nothing_is_allowed(temperature: float) -> None:
    """Regression: at temperature 0 a draft that mask and list together forbid was accepted."""
    size = 64
    params = SamplingParams(
        temperature=temperature, allowed_token_ids=(3, 4), acceptance="rejection"
    )
    mask = torch.zeros(size, dtype=torch.bool)
    mask[7:9] = True
    rows = [Row(params, 1, 5 + depth, mask=mask) for depth in range(2)]
    logits = torch.zeros(2, size)
    for draft in (0, 3, 7):
        probs = torch.eye(size)[draft : draft + 1]
        for chooser in (REFERENCE, CHOOSERS[size]):
            assert chooser.reject(logits, rows, [draft], probs) == (0, NOTHING_ALLOWED)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(batches(), st.data())
def test_the_rejection_rule_is_that_of_the_reference(
    batch: tuple[int, Tensor, list[Row]], data: st.DataObject
) -> None:
    size, logits, asked = batch
    first = dataclasses.replace(asked[0], mask=None)
    chain = [
        dataclasses.replace(first, position=first.position + i, num_output=first.num_output + i)
        for i in range(len(asked))
    ]
    drafted = torch.randn(len(asked) - 1, size, generator=torch.Generator().manual_seed(size)) * 2
    drafts = [data.draw(TOKENS) for _ in drafted]
    if not drafts or REFERENCE.choose(logits, chain).count(-1):
        return
    probs = REFERENCE.draft_probs(drafted + logits[:-1], chain[:-1], None, size)
    found = CHOOSERS[size].reject(logits, chain, drafts, probs)
    assert found == REFERENCE.reject(logits, chain, drafts, probs)


def test_every_setting_has_its_place_in_these_tests() -> None:
    """A new field must be handled by the compiled chooser, or be one that no choice depends on."""
    known = {*CHOICE, *TOLD, *RULE, *OTHERS}
    assert {field.name for field in dataclasses.fields(SamplingParams)} == known


# A setting that must change what is chosen from falling logits at temperature 0, or from nearly
# flat ones where it only counts at a temperature.
CHANGES: dict[str, Any] = {
    "temperature": 0.0, "top_k": 1, "top_p": 0.01, "min_p": 1.0, "repetition_penalty": 90.0,
    "presence_penalty": 2.0, "frequency_penalty": 2.0, "logit_bias": {9: 100.0},
    "allowed_token_ids": (9,), "banned_token_ids": (0,), "min_tokens": 4,
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICE)
def test_a_setting_changes_what_is_chosen(name: str) -> None:
    of_draws = name in ("temperature", "top_k", "top_p", "min_p")
    logits = -torch.arange(64.0).expand(20, -1) * (0.001 if of_draws else 0.5)
    logits = (logits + 1).contiguous()
    usual = {"temperature": 1.0 if of_draws else 0.0}
    found = []
    for fields in (usual, {**usual, name: CHANGES[name]}):
        params = SamplingParams(**fields)
        asked = [Row(params, i, 3, [0], [0], 1, frozenset({0})) for i in range(20)]
        found.append(CHOOSERS[64].choose(logits, asked))
    assert found[0] != found[1]


def test_the_acceptance_rule_is_asked_for_by_its_name() -> None:
    """The distributions that the rejection rule needs are those that choices are drawn from."""
    params = SamplingParams(acceptance="rejection", top_k=3)
    logits = torch.linspace(-1, 1, 64)[None]
    probs = CHOOSERS[64].draft_probs(logits, [Row(params, 1, 2)], None, 64)
    assert probs.nonzero()[:, 1].tolist() == [61, 62, 63]
    assert float(probs.sum()) == pytest.approx(1)


@pytest.mark.parametrize("purpose", [noise.CHOICE, noise.ACCEPTANCE, noise.RESIDUAL])
def test_noise_has_the_bits_of_the_reference(purpose: int) -> None:
    for seed, position in ((0, 0), (2**64 - 1, 7), (0x123456789ABCDEF0, 2**40)):
        key = compiled_noise.row_key(np.uint64(seed), position, np.uint64(purpose))
        assert int(key) == noise.row_key(seed, position, purpose)
        tokens = torch.tensor([0, 1, 2, 151_935, 2**31 - 1])
        wanted = noise.uniform([seed], [position], tokens, purpose)[0].tolist()
        assert [float(compiled_noise.uniform(t, np.uint64(key))) for t in tokens.tolist()] == wanted
        wanted = noise.gumbel([seed], [position], tokens, purpose)[0].tolist()
        found = [
            float(compiled_noise.gumbel(compiled_noise.uniform(t, np.uint64(key))))
            for t in tokens.tolist()
        ]
        assert found == pytest.approx(wanted, rel=1e-6)
