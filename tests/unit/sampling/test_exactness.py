"""The promise: the text for a seed does not depend on K, and its distribution is the target's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.long_runs import IS_LONG
from support.markov_decoder import Decoder, Markov
from support.sampling_reference import chi_square, reference_probs
from torch import Tensor

from headstart.sampling.choose import choose
from headstart.sampling.params import SamplingParams

ORIGINS = {"accepted", "recovered", "bonus"}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.8},
    "top-k": {"temperature": 1.3, "top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"temperature": 1.2, "min_p": 0.15},
    "penalties": {
        "repetition_penalty": 1.5, "presence_penalty": 0.6, "frequency_penalty": 0.4, "top_k": 4,
        "top_p": 0.95, "min_p": 0.02, "logit_bias": {2: 0.7}, "min_tokens": 2,
    },
}  # fmt: skip
END = frozenset({4})


def even_or_odd(text: Sequence[int]) -> Tensor:
    """A grammar: after an even token an odd one, or one that divides by 3."""
    tokens = torch.arange(23)
    return (tokens % 2 != (text[-1] % 2 if text else 0)) | (tokens % 3 == 0)


TEXTS: dict[str, dict[str, Any]] = {
    "greedy": {"params": {"temperature": 0}},
    "greedy with penalties": {
        "params": {"temperature": 0, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    },
    "plain": {"params": {}},
    "truncated": {"params": {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.02}},
    "penalties": {"params": {"presence_penalty": 0.8, "frequency_penalty": 0.4, "top_p": 0.9}},
    "min_tokens": {"params": {"min_tokens": 7, "temperature": 0.5}},
    "grammar": {"params": {"banned_token_ids": (3,)}, "grammar": even_or_odd},
}


def decoder(num_tokens: int, k: int, dtype: torch.dtype, **options: Any) -> Decoder:
    model = Markov.make(num_tokens, noise=0.7, spread=2.0, dtype=dtype)
    model.prompt = None
    params = SamplingParams(**options.pop("params"))
    return Decoder(model, params, k, end_ids=frozenset({5, 6}), **options)


def plain_text(source: Decoder, seed: int, length: int) -> list[int]:
    """Plain decoding, one token after the other, with nothing of the speculative loop."""
    text: list[int] = []
    for _ in range(length):
        a, b = [*source.model.prompt_of(seed), *text][-2:]
        row = source.row(seed, text, [], 0)
        text.append(int(choose(source.model.target[a, b].unsqueeze(0), [row])))
    return text


# The types of numbers take turns, unless there is time for all.
TYPED_TEXTS = [
    pytest.param(options, dtype, id=f"{name}-{kind}")
    for number, (name, options) in enumerate(TEXTS.items())
    for turn, (kind, dtype) in enumerate({"fp64": torch.float64, "fp32": torch.float32}.items())
    if IS_LONG or number % 2 == turn
]


@pytest.mark.parametrize(("options", "dtype"), TYPED_TEXTS)
def test_the_text_for_a_seed_does_not_depend_on_k(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    seeds = [3, 2**64 - 1, *range(1000, 1010)]
    plain = decoder(23, 0, dtype, **options)
    expected = [plain_text(plain, seed, 16) for seed in seeds]
    assert len(set(map(tuple, expected))) > 9, "seeds or prompts made no difference"
    for k in range(6):
        found = decoder(23, k, dtype, **options)
        assert found.run(seeds, 16) == expected, f"K = {k}"
        assert k == 0 or set(found.counts) == ORIGINS, found.counts


@pytest.mark.parametrize(
    ("name", "control"),
    [
        ("penalties", {"forgets_drafts": True}),
        ("greedy with penalties", {"forgets_drafts": True}),
        ("plain", {"noise_by_step": True}),
        ("plain", {"emits_drafts": True}),
        ("plain", {"rule": "rejection"}),
    ],
    ids=str,
)
def test_a_broken_loop_changes_the_text(name: str, control: dict[str, Any]) -> None:
    seeds = list(range(30))
    expected = decoder(23, 0, torch.float64, **TEXTS[name]).run(seeds, 16)
    assert decoder(23, 3, torch.float64, **TEXTS[name], **control).run(seeds, 16) != expected


def test_without_drafts_both_rules_give_the_same_text() -> None:
    seeds = list(range(20))
    expected = decoder(23, 0, torch.float64, **TEXTS["truncated"]).run(seeds, 12)
    rejection = decoder(23, 0, torch.float64, **TEXTS["truncated"], rule="rejection")
    assert rejection.run(seeds, 12) == expected


SMALL = Markov.make(5, noise=1.2, dtype=torch.float64)


def small_decoder(k: int, rule: str, name: str, **control: bool) -> Decoder:
    return Decoder(SMALL, SamplingParams(**SETTINGS[name]), k, rule, END, **control)


def joint_counts(source: Decoder, num_seeds: int) -> Tensor:
    """How often each pair of the first two tokens came, [5, 5]."""
    pairs = torch.tensor(source.run(range(num_seeds), 2))
    return (pairs[:, 0] * 5 + pairs[:, 1]).bincount(minlength=25).view(5, 5)


def joint_probs(name: str) -> Tensor:
    """What they should be, from the plain reference of the processors."""
    params = SamplingParams(**SETTINGS[name])
    first = _next(params, [])
    return torch.stack([first[token] * _next(params, [token]) for token in range(5)])


def _next(params: SamplingParams, output: list[int]) -> Tensor:
    a, b = [1, 0, *output][-2:]
    logits = SMALL.target[a, b].tolist()
    return reference_probs(logits, params, prompt=SMALL.prompt, output=output, end_ids=tuple(END))


def num_seeds(name: str) -> int:
    return 800 if name == "penalties" else 1800  # rows with penalties are slow


# Every rule and setting with one of the four K, every K with both rules, unless there is time for
# all.
CASES = [
    (rule, name, k)
    for rule in ("match", "rejection")
    for number, name in enumerate(SETTINGS)
    for k in (1, 2, 3, 4)
    if IS_LONG or (number + k + 2 * (rule == "match")) % 4 == 0
]


@pytest.mark.parametrize(("rule", "name", "k"), CASES)
def test_emitted_tokens_follow_the_targets_distribution(rule: str, name: str, k: int) -> None:
    found = small_decoder(k, rule, name)
    statistic, bound = chi_square(joint_counts(found, num_seeds(name)), joint_probs(name))
    assert statistic < bound
    assert set(found.counts) == ORIGINS
    share = found.counts["accepted"] / found.counts.total()
    assert 0.1 < share < 0.9, "the draft must be right sometimes and wrong sometimes"


@pytest.mark.parametrize(
    ("rule", "control"),
    [("match", "emits_drafts"), ("rejection", "wrong_draft_probs")],
)
@pytest.mark.parametrize("name", ["plain", "penalties"])
def test_the_chi_square_sees_a_wrong_rule(rule: str, control: str, name: str) -> None:
    found = small_decoder(2, rule, name, **{control: True})
    statistic, bound = chi_square_or_worse(joint_counts(found, num_seeds(name)), joint_probs(name))
    assert statistic > bound


def chi_square_or_worse(counts: Tensor, probs: Tensor) -> tuple[float, float]:
    """As chi_square; a token that cannot come counts as an infinite statistic."""
    if counts[probs < 1e-12].sum():
        return float("inf"), 0.0
    return chi_square(counts, probs)
