"""Speculation changes speed and nothing else: the same token ids for every K, batch and memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.engine_runs import (
    FAMILIES,
    VOCAB,
    GreedyTexts,
    assert_head_is_alive,
    checkpoint,
    greedy,
    ids_of,
    make_prompts,
    run,
    soft,
    start,
    transformers_model,
)
from support.head_edits import edited
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

from headstart.sampling.params import SamplingParams

PROMPTS = make_prompts()
# K, block size, rows per step, slots of memory, prefix caching
SHAPES: dict[str, tuple[Any, int, int, int, bool]] = {
    "K=0, little memory": (0, 4, 24, 72, True),
    "K=1, blocks of one": (1, 1, 40, 900, True),
    "K=2, chunks of five rows": (2, 3, 5, 900, True),
    "K=3, all at once": (3, 16, 512, 2000, True),
    "K=3, little memory": (3, 4, 32, 72, True),
    "K=4, little memory, no prefix cache": (4, 3, 16, 75, False),
    "K=5, blocks of 16, memory for one": (5, 16, 64, 80, True),
    "auto, little memory": ("auto", 4, 48, 100, True),
}
TIGHT = {name for name in SHAPES if "memory" in name}
# Shapes do to one family what they do to another: all of them with mimo, two with each other one.
ALL = [(family, shape) for family in FAMILIES for shape in SHAPES]
SOME = [
    case for number, case in enumerate(ALL) if number % len(SHAPES) % 4 == number // len(SHAPES)
]


def answers(folder: Path, shape: str, params: Any, **settings: Any) -> tuple[list[list[int]], Any]:
    k, size, rows, slots, caching = SHAPES[shape]
    engine = start(
        folder, speculate=k, block_size=size, max_batched_tokens=rows, slots=slots,
        prefix_caching=caching, **settings,
    )  # fmt: skip
    prompts = PROMPTS
    if not isinstance(params, SamplingParams):
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    results = run(engine, prompts, params)
    if k not in (0, "auto"):
        assert_head_is_alive(results)
    return ids_of(results), engine.stats


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tiny: Tiny) -> tuple[str, Path]:
    return request.param, checkpoint(tiny, request.param)


@pytest.fixture(scope="module")
def said() -> Callable[[Path], GreedyTexts]:
    """What transformers says, once: tests of one model are not always run in a row."""
    return cache(lambda folder: GreedyTexts(transformers_model(folder)))


@pytest.fixture(scope="module")
def published_answers(model: tuple[str, Path], said: Callable[[Path], GreedyTexts]) -> GreedyTexts:
    """From transformers, on the trunk as it was before grafting."""
    family, folder = model
    if family in ("llama", "qwen2"):
        folder = folder.parent / folder.name.removesuffix("-grafted")
    return said(folder)


@pytest.mark.parametrize(
    ("model", "shape"), unless_long(SOME, ALL), indirect=["model"], scope="module"
)
def test_greedy_text_is_that_of_transformers(
    shape: str, model: tuple[str, Path], published_answers: GreedyTexts
) -> None:
    found, stats = answers(model[1], shape, greedy(20))
    assert found == published_answers.like(found, PROMPTS, 20)
    if shape in TIGHT:
        assert stats.preemptions > 0, "memory was not tight"
    if SHAPES[shape][-1] and SHAPES[shape][1] < 16:
        assert stats.cached_tokens > 0, "no prefix was reused"


def test_another_text_than_that_of_transformers_would_be_found(tiny: Tiny) -> None:
    folder = checkpoint(tiny)
    (own,) = ids_of(run(start(folder, speculate=0), PROMPTS[:1], greedy(6)))
    wrong = [*own[:3], (own[3] + 1) % VOCAB, *own[4:]]
    texts = GreedyTexts(transformers_model(folder))
    assert texts.like([wrong], PROMPTS[:1], 6) == [own]
    with pytest.raises(AssertionError, match=r"\[5\] tokens, not 6 each"):
        texts.like([own[:-1]], PROMPTS[:1], 6)


def test_the_head_agrees_with_its_trunk_now_and_then_at_every_depth(
    model: tuple[str, Path],
) -> None:
    engine = start(model[1], speculate=3, slots=4000)
    run(engine, [[a, b, a + b, 2 * a % VOCAB] for a in range(2, 26) for b in (3, 17)], greedy(24))
    rates = engine.stats.acceptance.conditional
    assert len(rates) == 3
    assert all(0.2 <= rate <= 0.9 for rate in rates), rates


def test_a_head_with_its_halves_swapped_gives_the_same_text_and_other_counters(
    model: tuple[str, Path], published_answers: GreedyTexts, tmp_path: Path
) -> None:
    """The control of the counters: text alone would not notice a head that is fed wrongly."""

    def swap(own: dict[str, Any]) -> None:
        name = next(n for n in own if n.endswith(("input_proj.weight", "mtp.fc.weight")))
        own[name] = own[name].roll(own[name].shape[0], dims=1).contiguous()

    other = edited(model[1], tmp_path / "swapped", change=swap)
    accepted = []
    for folder in (model[1], other):
        engine = start(folder, speculate=3)
        found = ids_of(run(engine, PROMPTS, greedy(20)))
        assert found == published_answers.like(found, PROMPTS, 20)
        accepted.append(sum(engine.stats.acceptance.accepted))
    assert accepted[1] < accepted[0] / 2


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 1.3},
    "top-k": {"temperature": 0.8, "top_k": 12},
    "top-p": {"temperature": 0.9, "top_p": 0.7},
    "min-p": {"min_p": 0.05},
    "all three": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"temperature": 0.6, "repetition_penalty": 1.3},
    "presence and frequency": {"presence_penalty": 0.6, "frequency_penalty": 0.4},
    "greedy with penalties": {"temperature": 0, "repetition_penalty": 1.4, "ignore_eos": False},
    "bias": {"temperature": 0.7, "logit_bias": {5: 3.0, 9: -2.0}},
    "banned": {"temperature": 0.7, "banned_token_ids": tuple(range(20, 40))},
    "allowed": {"allowed_token_ids": tuple(range(3, 30)), "temperature": 0.7},
    "min_tokens": {"min_tokens": 12, "ignore_eos": False, "logit_bias": {1: 4.0}},
    "end token likely": {"ignore_eos": False, "logit_bias": {1: 2.0}},
    "stop token": {"stop_token_ids": (11, 12, 13), "temperature": 0.8},
    "short": {"max_tokens": 2},
    "one token": {"max_tokens": 1},
}


def sampled() -> list[SamplingParams]:
    usual = {"max_tokens": 22, "ignore_eos": True}
    return [
        SamplingParams(**{**usual, "seed": seed, **fields})
        for seed, fields in enumerate(SETTINGS.values())
    ]


@pytest.fixture(scope="module")
def plain_samples(tiny: Tiny) -> list[list[int]]:
    """One request at a time, without drafts."""
    engine = start(soft(tiny), speculate=0)
    return [
        ids_of(run(engine, [PROMPTS[i % len(PROMPTS)]], params))[0]
        for i, params in enumerate(sampled())
    ]


@pytest.mark.parametrize("shape", unless_long(list(SHAPES)[1::4], list(SHAPES)))
def test_sampled_text_depends_on_the_seed_and_not_on_k(
    shape: str, tiny: Tiny, plain_samples: list[list[int]]
) -> None:
    found, _ = answers(soft(tiny), shape, sampled())
    different = [n for n, a, b in zip(SETTINGS, found, plain_samples, strict=True) if a != b]
    assert not different


@pytest.mark.parametrize("shape", ["K=3, all at once", "K=4, little memory, no prefix cache"])
def test_float32_gives_the_same_text_for_every_k(shape: str, tiny: Tiny) -> None:
    folder = soft(tiny, "qwen3")
    params = [*sampled(), *[greedy(22)] * 6]
    engine = start(folder, speculate=0, dtype="float32")
    expected = ids_of(run(engine, [PROMPTS[i % 10] for i in range(len(params))], params))
    assert answers(folder, shape, params, dtype="float32")[0] == expected


def test_another_seed_gives_another_text(tiny: Tiny) -> None:
    """The control of the seeds."""
    engine = start(soft(tiny), speculate=3)
    params = [SamplingParams(seed=seed, max_tokens=20, ignore_eos=True) for seed in (1, 1, 2)]
    one, again, other = ids_of(run(engine, [PROMPTS[0]] * 3, params))
    assert one == again != other


@pytest.mark.parametrize("speculate", unless_long([3], [1, 3]))
@pytest.mark.parametrize("topology", ["chained", "parallel"])
def test_heads_of_three_modules_give_the_same_text(
    topology: str, speculate: int, tiny: Tiny
) -> None:
    folder = checkpoint(tiny, num_nextn_predict_layers=3)
    expected = ids_of(run(start(folder, speculate=0), PROMPTS, greedy()))
    for size, rows, slots in ((16, 512, 2000), (1, 9, 100), (2, 24, 80)):
        engine = start(
            folder, speculate=speculate, topology=topology, block_size=size,
            max_batched_tokens=rows, slots=slots,
        )  # fmt: skip
        results = run(engine, PROMPTS, greedy())
        assert ids_of(results) == expected
        assert_head_is_alive(results)
