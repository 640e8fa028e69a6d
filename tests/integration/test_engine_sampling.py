"""Samples, seeds, log-probabilities and draft vocabularies: the same with drafts and without."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.engine_runs import (
    PROMPT,
    VOCAB,
    assert_head_is_alive,
    greedy,
    ids_of,
    make_prompts,
    run,
    seeded,
    soft,
    start,
)
from support.tiny_fixture import Tiny

from headstart.engine.engine import Engine
from headstart.sampling.params import SamplingParams


def test_n_samples_differ_from_each_other_and_not_with_k(plain: Engine, drafting: Engine) -> None:
    expected, found = (run(e, [PROMPT], seeded(n=4)) for e in (plain, drafting))
    assert ids_of(found) == ids_of(expected)
    assert len({tuple(ids) for ids in ids_of(found)}) == 4
    assert [output.index for output in found[0].outputs] == [0, 1, 2, 3]
    assert_head_is_alive(found)
    assert ids_of(run(drafting, [PROMPT], seeded()))[0] == ids_of(found)[0]


def test_a_request_without_a_seed_reports_one_that_repeats_it(drafting: Engine) -> None:
    free = run(drafting, [PROMPT], seeded(seed=None))[0]
    again = run(drafting, [PROMPT], seeded(seed=free.stats.seed))[0]
    assert ids_of([again]) == ids_of([free])


def test_a_seed_is_kept_across_preemption(tiny: Tiny) -> None:
    engine = start(soft(tiny), speculate=3, slots=72)
    free = run(engine, [PROMPT] * 6, seeded(seed=None))
    assert engine.stats.preemptions > 0
    for result in free:
        again = run(engine, [PROMPT], seeded(seed=result.stats.seed))
        assert ids_of(again) == ids_of([result])


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_are_those_of_plain_decoding(mode: Any, plain: Engine, drafting: Engine) -> None:
    params = seeded(logprobs=3, logprobs_mode=mode, temperature=0.8, top_k=9)
    one, other = (run(e, [PROMPT], params)[0].outputs[0] for e in (plain, drafting))
    assert one.logprobs is not None and other.logprobs is not None
    assert len(other.logprobs) == len(other.token_ids)
    for a, b in zip(one.logprobs, other.logprobs, strict=True):
        assert a.token == b.token
        assert math.isclose(a.logprob, b.logprob, abs_tol=1e-9)
        assert list(a.top) == list(b.top)
        assert len(b.top) == 3
        assert all(math.isclose(a.top[t], b.top[t], abs_tol=1e-9) for t in a.top)
    assert {"accepted", "recovered"} <= set(other.origins)


def test_a_draft_vocabulary_changes_the_drafts_and_not_the_text(tiny: Tiny) -> None:
    folder = soft(tiny)
    expected = ids_of(run(start(folder, speculate=0), make_prompts(), seeded()))
    counts = []
    for vocab in (None, range(0, VOCAB, 2), [*range(40), 3]):
        engine = start(folder, speculate=3, draft_vocab=vocab)
        proposed: set[int] = set()
        propose = engine.loop.drafter.propose

        def watch(drafting: Any, propose: Any = propose, proposed: Any = proposed) -> None:
            propose(drafting)
            proposed |= {token for request in drafting for token in request.drafts}

        engine.loop.drafter.propose = watch
        results = run(engine, make_prompts(), seeded())
        assert ids_of(results) == expected
        assert_head_is_alive(results)
        assert proposed <= set(vocab if vocab is not None else range(VOCAB))
        counts.append(sum(engine.stats.acceptance.accepted))
    assert counts[1] < counts[0]


def test_each_request_may_choose_its_own_k(plain: Engine, tiny: Tiny) -> None:
    engine = start(soft(tiny), speculate=2)
    params = [seeded(speculate=k) for k in (None, 0, 1, 4)]
    results = run(engine, [PROMPT] * 4, params)
    assert ids_of(results) == ids_of(run(plain, [PROMPT] * 4, seeded()))
    assert [len(r.stats.acceptance.drafted) for r in results] == [2, 0, 1, 4]


# Whatever the first token is, the prompt went on behind it: often as the model does.
WENT_ON = ((0, 3, 1), (1, 4, 0), (2, 1, 0), (3, 1, 4), (4, 0, 1))
REPEATING = [token for own in WENT_ON for token in (3, 4, *own)] + [3, 4]
DRAFTS: dict[str, tuple[list[int], Any]] = {
    "accepted": ([2, 3, 4], "head"), "copied": (REPEATING, "context"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("origin", DRAFTS)
def test_the_rejection_rule_gives_the_target_distribution(
    origin: str, dtype: str, tiny: Tiny
) -> None:
    """1,000 pairs of drafted tokens of a five-token vocabulary, by chi-square."""
    prompt, draft_from = DRAFTS[origin]
    folder = tiny(
        "mimo", rate=0.8, seed=0, dtype="F32", hidden_size=32, vocab_size=5, head_dim=8,
        intermediate_size=16, num_hidden_layers=1,
    )  # fmt: skip
    params = {"temperature": 2.0, "ignore_eos": True, "max_tokens": 4}
    exact = _pair_probabilities(start(folder, speculate=0), prompt, params["temperature"])
    engine = Engine(
        folder, speculate=2, dtype=dtype, device="cpu", kv_bytes=4_000_000, block_size=4,
        max_running_requests=256, max_batched_tokens=2048,
    )  # fmt: skip
    counts = torch.zeros(5, 5, dtype=torch.float64)
    origins: list[Any] = []
    asked = SamplingParams(**params, acceptance="rejection", seed=1, n=1000, draft_from=draft_from)
    results = engine.generate([prompt], asked)
    for output in results[0].outputs:
        counts[output.token_ids[1], output.token_ids[2]] += 1
        origins += output.origins[1:]
    assert {origin, "recovered", "bonus"} == {*origins}
    # 24 degrees of freedom: above 59 once in 10 000 correct implementations
    assert _chi_square(counts, exact) < 59
    colder = exact**1.5 / (exact**1.5).sum()
    assert _chi_square(counts, colder) > 59, "the control: a slightly wrong distribution passes"


def _chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def _pair_probabilities(engine: Engine, prompt: list[int], temperature: float) -> torch.Tensor:
    """P(second and third token), summed over the first, from raw log-probabilities."""

    def after(text: list[int]) -> torch.Tensor:
        output = run(engine, [text], greedy(1, logprobs=5))[0].outputs[0]
        assert output.logprobs is not None
        top = output.logprobs[0].top
        logits = torch.tensor([top[token] for token in range(5)], dtype=torch.float64)
        return (logits / temperature).softmax(0)

    result = torch.zeros(5, 5, dtype=torch.float64)
    first = after(prompt)
    for a in range(5):
        second = after([*prompt, a])
        for b in range(5):
            result[b] += first[a] * second[b] * after([*prompt, a, b])
    return result
