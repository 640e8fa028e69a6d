"""What a request can ask for, with drafts and without: the answer is the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import (
    VOCAB,
    assert_head_is_alive,
    checkpoint,
    greedy,
    ids_of,
    make_prompts,
    run,
    soft,
    start,
)
from tiny_fixture import Tiny

from headstart.engine.engine import Engine
from headstart.errors import ConfigError, RequestError
from headstart.sampling.params import SamplingParams

PROMPT = make_prompts()[3]


@pytest.fixture(scope="module")
def plain(tiny: Tiny) -> Engine:
    return start(soft(tiny), speculate=0)


@pytest.fixture(scope="module")
def drafting(tiny: Tiny) -> Engine:
    return start(soft(tiny), speculate=3)


def seeded(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 5, "max_tokens": 24, "ignore_eos": True, **fields})


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


def cut_inside_a_chunk(engine: Engine, **fields: Any) -> bool:
    """Whether some round had verified more than was emitted."""
    seen = []
    emit = engine._emit

    def watch(request: Any, verdict: Any) -> None:
        before = request.num_output
        emit(request, verdict)
        seen.append(request.num_output - before < len(verdict.tokens))

    engine._emit = watch
    try:
        for prompt in make_prompts():
            run(engine, [prompt], seeded(**fields))
    finally:
        del engine._emit
    return any(seen)


@pytest.mark.parametrize(
    "fields",
    [{"stop_token_ids": tuple(range(8, 20))}, {"stop": ("t14", "5 t", "t2")},
     {"ignore_eos": False, "logit_bias": {1: 3.0}}],
    ids=["stop tokens", "stop strings", "end of text"],
)  # fmt: skip
def test_tokens_behind_a_stop_inside_a_verified_chunk_are_dropped(
    fields: dict[str, Any], plain: Engine, drafting: Engine
) -> None:
    greedy_too = [{**fields, "temperature": 0.0}, {**fields, "temperature": 0.7}]
    assert any(cut_inside_a_chunk(drafting, **each) for each in greedy_too)
    for each in greedy_too:
        expected, found = (run(e, make_prompts(), seeded(**each)) for e in (plain, drafting))
        for one, other in zip(expected, found, strict=True):
            ours, theirs = other.outputs[0], one.outputs[0]
            assert ours.token_ids == theirs.token_ids
            assert (ours.text, ours.finish_reason, ours.stop_reason) == (
                theirs.text, theirs.finish_reason, theirs.stop_reason,
            )  # fmt: skip
        assert any(r.outputs[0].finish_reason == "stop" for r in found)


def test_a_stop_string_is_cut_from_the_text_or_kept_on_request(drafting: Engine) -> None:
    whole = run(drafting, [PROMPT], seeded(temperature=0))[0].outputs[0].text
    stop = whole.split(" ")[7]
    end = whole.index(stop)
    for keep in (False, True):
        params = seeded(temperature=0, stop=(stop,), include_stop_str_in_output=keep)
        output = run(drafting, [PROMPT], params)[0].outputs[0]
        assert output.text == whole[: end + len(stop) if keep else end]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_streamed_parts_add_up_to_the_text_and_never_show_a_stop_string(
    drafting: Engine,
) -> None:
    whole = run(drafting, [PROMPT], seeded(temperature=0))[0].outputs[0].text
    stop = " ".join(whole.split(" ")[6:9])
    updates = list(drafting.stream(PROMPT, seeded(temperature=0, stop=(stop,))))
    assert "".join(u.text for u in updates) == whole[: whole.index(stop)]
    assert max(len(u.token_ids) for u in updates) > 1
    assert [u.finish_reason for u in updates][-1] == "stop"
    assert drafting.pool.num_used == 0


def test_a_stream_that_is_left_gives_its_memory_back(drafting: Engine) -> None:
    stream = drafting.stream(PROMPT, seeded())
    next(stream)
    stream.close()
    assert (drafting.has_work, drafting.pool.num_used) == (False, 0)


@pytest.mark.parametrize("speculate", [0, 3])
def test_the_end_token_ends_ignores_or_waits_as_asked(speculate: int, tiny: Tiny) -> None:
    engine = start(soft(tiny), speculate=speculate)
    bias = {"logit_bias": {1: 100.0}, "max_tokens": 9}
    ended, ignored, waited = (
        run(engine, [PROMPT], seeded(**bias, **more))[0].outputs[0]
        for more in ({"ignore_eos": False}, {}, {"ignore_eos": False, "min_tokens": 6})
    )
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([1], "stop", 1)
    assert (ignored.token_ids, ignored.finish_reason) == ([1] * 9, "length")
    assert waited.token_ids[6:] == [1]
    assert 1 not in waited.token_ids[:6]


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


class Parity:
    """A toy grammar: odd and even ids take turns, and after `limit` tokens nothing is allowed."""

    def __init__(self, limit: int = 1000, state: int = 0):
        self.limit, self.state = limit, state

    def allowed(self) -> torch.Tensor:
        ids = torch.arange(VOCAB)
        return (ids % 2 == self.state % 2) & (self.state < self.limit)

    def accept(self, token: int) -> bool:
        if token % 2 != self.state % 2 or self.state >= self.limit:
            return False
        self.state += 1
        return True

    def fork(self) -> Parity:
        return Parity(self.limit, self.state)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_holds_in_every_row_and_does_not_depend_on_k(
    temperature: float, plain: Engine, drafting: Engine
) -> None:
    params = seeded(temperature=temperature)
    grammar = Parity()
    expected, found = (
        run(e, make_prompts(), params, grammar=grammar) for e in (plain, drafting)
    )  # fmt: skip
    assert ids_of(found) == ids_of(expected)
    assert all(token % 2 == i % 2 for ids in ids_of(found) for i, token in enumerate(ids))
    assert_head_is_alive(found)
    assert grammar.state == 0, "every sample works on a copy"


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_a_grammar_that_has_ended_ends_the_answer(acceptance: Any, drafting: Engine) -> None:
    params = seeded(acceptance=acceptance, logprobs=0)
    for limit in (1, 2, 3, 5, 8):
        output = run(drafting, [PROMPT], params, grammar=Parity(limit))[0].outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (limit, "stop")
        assert output.text.split(" ") == [f"t{token}" for token in output.token_ids]


def test_a_draft_vocabulary_changes_the_drafts_and_not_the_text(tiny: Tiny) -> None:
    folder = soft(tiny)
    expected = ids_of(run(start(folder, speculate=0), make_prompts(), seeded()))
    counts = []
    for vocab in (None, range(0, VOCAB, 2), [*range(40), 3]):
        engine = start(folder, speculate=3, draft_vocab=vocab)
        proposed: set[int] = set()
        propose = engine.drafter.propose

        def watch(drafting: Any, propose: Any = propose, proposed: Any = proposed) -> None:
            propose(drafting)
            proposed |= {token for request in drafting for token in request.drafts}

        engine.drafter.propose = watch
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


def test_drafting_stops_while_too_many_requests_run(tiny: Tiny) -> None:
    engine = start(soft(tiny), speculate=3, speculate_off_above=2)
    run(engine, [PROMPT] * 2, seeded(max_tokens=12))
    assert sum(engine.stats.acceptance.drafted) > 0
    before = list(engine.stats.acceptance.drafted)
    for seed in range(4):
        engine.add(PROMPT, seeded(seed=seed, max_tokens=12))
    while len(engine.scheduler.running) != 0 or engine.scheduler.waiting:
        engine.step()
        if len(engine.scheduler.running) == 4:
            assert engine.stats.acceptance.drafted == before
            assert "speculate_off_above 2" in engine.stats.draft_reason


@pytest.mark.parametrize("size", [4, 16])
def test_auto_starts_with_little_memory_and_short_texts(size: int, tiny: Tiny) -> None:
    """Regression: profiling used more slots and positions than there were."""
    folder = soft(tiny)
    engine = start(folder, speculate="auto", slots=24, block_size=size, max_model_len=14)
    expected = run(start(folder, speculate=0, max_model_len=14), [[5, 6, 7]], seeded(max_tokens=9))
    assert ids_of(run(engine, [[5, 6, 7]], seeded(max_tokens=9))) == ids_of(expected)


def test_a_single_request_may_reach_the_model_length(tiny: Tiny) -> None:
    """Regression: the block that the last token needs was not counted."""
    engine = start(
        soft(tiny), speculate=3, slots=5000, max_model_len=32, max_running_requests=1
    )  # fmt: skip
    result = run(engine, [[5] * 10], seeded(max_tokens=None))[0].outputs[0]
    assert (len(result.token_ids), result.finish_reason) == (22, "length")


def test_an_aborted_request_keeps_what_it_had_and_frees_its_memory(drafting: Engine) -> None:
    name = drafting.add(PROMPT, seeded(n=2))
    for _ in range(4):
        drafting.step()
    drafting.abort(name)
    drafting.abort("nobody")
    assert (drafting.has_work, drafting.pool.num_used) == (False, 0)
    result = drafting.collect(name)
    assert [output.finish_reason for output in result.outputs] == ["abort", "abort"]
    assert all(output.token_ids for output in result.outputs)


def test_counters_of_tokens_count_every_prompt_and_output_token(tiny: Tiny) -> None:
    """Regression: prompts that were read in one step were not counted."""
    engine = start(soft(tiny), speculate=3, prefix_caching=False, max_batched_tokens=16)
    prompts = make_prompts()
    run(engine, prompts, seeded())
    assert engine.stats.prompt_tokens == sum(map(len, prompts))
    assert engine.stats.output_tokens == 24 * len(prompts)
    assert engine.stats.finished == len(prompts)


def test_the_rejection_rule_gives_the_target_distribution(tiny: Tiny) -> None:
    """1 500 pairs of drafted tokens of a five-token vocabulary, by chi-square."""
    folder = tiny(
        "mimo", rate=0.8, seed=0, dtype="F32", hidden_size=32, vocab_size=5, head_dim=8,
        intermediate_size=16, num_hidden_layers=1,
    )  # fmt: skip
    prompt = [2, 3, 4]
    params = {"temperature": 2.0, "ignore_eos": True, "max_tokens": 4}
    exact = _pair_probabilities(start(folder, speculate=0), prompt, params["temperature"])
    engine = Engine(
        folder, speculate=2, dtype="float64", device="cpu", kv_bytes=4_000_000, block_size=4,
        max_running_requests=256, max_batched_tokens=2048,
    )  # fmt: skip
    counts = torch.zeros(5, 5, dtype=torch.float64)
    origins: list[Any] = []
    results = engine.generate(
        [prompt], SamplingParams(**params, acceptance="rejection", seed=1, n=1500)
    )
    for output in results[0].outputs:
        counts[output.token_ids[1], output.token_ids[2]] += 1
        origins += output.origins[1:]
    assert {"accepted", "recovered", "bonus"} <= set(origins)
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


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "empty": ([], {}, RequestError, "the prompt is empty"),
    "id too high": ([3, VOCAB], {}, RequestError, "outside 0 to 63"),
    "id below zero": ([3, -1], {}, RequestError, "outside 0 to 63"),
    "not ids": ([3, "x"], {}, RequestError, "a list of token ids, or a list of messages"),
    "too long": ([3] * 2000, {}, RequestError, "2000 tokens; prompt and answer together may have"),
    "draft vocabulary": ([3], {"draft_vocab": "short"}, RequestError, "is called 'short'"),
    "auto in a fixed engine": ([3], {"speculate": "auto"}, RequestError, "started with it"),
    "stop id": ([3], {"stop_token_ids": (999,)}, ConfigError, "stop_token_ids holds 999"),
    "chat without template": ([{"role": "user", "content": "t3"}], {}, RequestError, "template"),
}


@pytest.mark.parametrize(("prompt", "fields", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_answered_is_refused_with_a_reason(
    prompt: Any, fields: dict[str, Any], error: type[Exception], words: str, drafting: Engine
) -> None:
    with pytest.raises(error, match=words):
        drafting.add(prompt, seeded(**fields))
    assert not drafting.has_work


def test_an_id_in_use_is_refused_and_a_free_one_is_found(drafting: Engine) -> None:
    """Regression: a chosen id that looked like a made one kept strangers out."""
    taken = drafting.add([3], seeded(max_tokens=1))
    with pytest.raises(RequestError, match="is in use"):
        drafting.add([3], seeded(), request_id=taken)
    chosen = drafting.add([3], seeded(), request_id=f"request-{drafting._arrivals + 1}")
    made = drafting.add([3], seeded(max_tokens=1))
    assert len({taken, chosen, made}) == 3
    for name in (taken, chosen, made):
        drafting.abort(name)
        drafting.collect(name)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"speculate": 99}, "speculate is 99"), ({"block_size": 0}, "block_size is 0"),
     ({"memory_fraction": 0.0}, "memory_fraction"), ({"max_model_len": 1}, "max_model_len is 1"),
     ({"dtype": "int3"}, "dtype is 'int3'")],
)  # fmt: skip
def test_settings_without_sense_are_refused(
    settings: dict[str, Any], words: str, tiny: Tiny
) -> None:
    with pytest.raises(ConfigError, match=words):
        Engine(checkpoint(tiny), **settings)


def test_text_and_ids_are_the_same_prompt(drafting: Engine) -> None:
    ids = [20, 33, 5, 41, 60]
    text = " ".join(f"t{token}" for token in ids)
    one, other = run(drafting, [text, ids], seeded(banned_token_ids=(1,)))
    assert one.prompt_token_ids == other.prompt_token_ids == ids
    assert ids_of([one]) == ids_of([other])
    assert one.outputs[0].text == " ".join(f"t{token}" for token in ids_of([one])[0])


def test_a_checkpoint_without_a_head_runs_without_drafts_and_says_so(tiny: Tiny) -> None:
    folder: Path = tiny("mimo", with_head=False, **{**_SIZES_ONLY})
    engine = start(folder, speculate=3)
    results = run(engine, [PROMPT], seeded(max_tokens=5))
    assert set(results[0].outputs[0].origins) == {"bonus"}
    assert any("no head" in note for note in engine.notes)


_SIZES_ONLY = {"seed": 1, "dtype": "F32", "hidden_size": 128, "vocab_size": 64, "head_dim": 16,
               "intermediate_size": 64, "num_hidden_layers": 2}  # fmt: skip


def test_drafts_asked_of_an_engine_without_a_head_are_refused(tiny: Tiny) -> None:
    engine = start(soft(tiny), speculate=0)
    with pytest.raises(RequestError, match=r"asks for speculate 2 .* without a head"):
        engine.add([5, 6], SamplingParams(speculate=2))
    engine.add([5, 6], SamplingParams(speculate=0, max_tokens=1))
    assert engine.has_work
