"""The life of requests: queued, streamed side by side, aborted, collected, forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine_runs import PROMPT, SIZES, ids_of, make_prompts, run, seeded, soft, start
from support.tiny_fixture import Tiny

from headstart.data.prompt_reader import PromptReader
from headstart.engine import kv_cache
from headstart.engine.engine import Engine
from headstart.errors import RequestError
from headstart.sampling.params import SamplingParams


@pytest.fixture(scope="module")
def drafting(tiny: Tiny) -> Engine:
    return start(soft(tiny), speculate=3)


def test_a_stream_that_is_left_gives_its_memory_back(drafting: Engine) -> None:
    stream = drafting.stream(PROMPT, seeded())
    next(stream)
    stream.close()
    assert (drafting.has_work, drafting.pool.num_used) == (False, 0)


def test_a_stream_leaves_alone_who_has_taken_its_id(drafting: Engine) -> None:
    """Regression: it went on with the other's text, and its end aborted the other."""
    stream = drafting.stream(PROMPT, seeded(), request_id="a")
    next(stream)
    drafting.abort("a")
    drafting.add([9, 8], seeded(max_tokens=9), request_id="a")
    assert all(update.finish_reason == "abort" for update in stream)
    stream.close()
    while drafting.has_work:
        drafting.step()
    assert drafting.collect("a").outputs[0].finish_reason == "length"


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


def test_text_and_ids_are_the_same_prompt(drafting: Engine) -> None:
    ids = [20, 33, 5, 41, 60]
    text = " ".join(f"t{token}" for token in ids)
    one, other = run(drafting, [text, ids], seeded(banned_token_ids=(1,)))
    assert one.prompt_token_ids == other.prompt_token_ids == ids
    assert ids_of([one]) == ids_of([other])
    assert one.outputs[0].text == " ".join(f"t{token}" for token in ids_of([one])[0])


def test_a_checkpoint_without_a_head_runs_without_drafts_and_says_so(tiny: Tiny) -> None:
    folder: Path = tiny("mimo", with_head=False, seed=1, dtype="F32", **SIZES)
    engine = start(folder, speculate=3)
    results = run(engine, [PROMPT], seeded(max_tokens=5))
    assert set(results[0].outputs[0].origins) == {"bonus"}
    assert any("no head" in note for note in engine.notes)


def test_streams_side_by_side_get_all_their_tokens(drafting: Engine) -> None:
    """Regression: each stream dropped what its steps made for the others."""
    params = seeded(max_tokens=12)
    expected = ids_of(drafting.generate([PROMPT, [9, 8]], params))
    found: list[list[int]] = [[], []]
    streams = [drafting.stream(PROMPT, params), drafting.stream([9, 8], params)]
    is_open = [True, True]
    while any(is_open):
        for i, stream in enumerate(streams):
            update = next(stream, None)
            is_open[i] = update is not None
            found[i] += update.token_ids if update is not None else []
    assert found == expected
    assert len(drafting._groups) == 0


def test_what_streams_and_generate_make_for_others_is_handed_out_by_the_next_step(
    drafting: Engine,
) -> None:
    """Regression: tokens of added requests vanished while another caller generated."""
    expected = ids_of(drafting.generate([PROMPT], seeded(max_tokens=9)))[0]
    name = drafting.add(PROMPT, seeded(max_tokens=9))
    drafting.generate([[9, 8]], seeded())
    list(drafting.stream([9, 8], seeded()))
    assert drafting.has_work, "updates wait, though nothing runs"
    updates = drafting.step()
    assert {update.request_id for update in updates} == {name}
    assert [token for update in updates for token in update.token_ids] == expected
    assert not drafting.has_work
    assert drafting.collect(name).outputs[0].token_ids == expected


def test_generate_ends_with_its_own_answers_and_leaves_others_running(drafting: Engine) -> None:
    name = drafting.add(PROMPT, seeded(max_tokens=60))
    drafting.generate([[9, 8]], seeded(max_tokens=2))
    assert drafting.has_work
    drafting.abort(name)
    assert drafting.collect(name).outputs[0].finish_reason == "abort"


def test_aborted_requests_that_nobody_collects_are_forgotten_in_the_end(
    drafting: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.engine.groups._ABORTED_KEPT", 3)
    names = [drafting.add([3], seeded()) for _ in range(5)]
    for name in names:
        drafting.abort(name)
    assert len(drafting._groups) == 3
    with pytest.raises(RequestError, match="no request is called"):
        drafting.collect(names[0])
    assert drafting.add([3], seeded(), request_id=names[2]) == names[2], "its id is free again"
    for name in names[2:]:
        drafting.abort(name)
        drafting.collect(name)
    assert len(drafting._groups) == 0


def test_finished_requests_keep_no_states_while_they_wait_for_their_collector(
    tiny: Tiny,
) -> None:
    """Regression: each kept the states of its whole prompt on the device."""
    engine = start(soft(tiny), speculate=3, slots=4000)
    drafter = engine.loop.drafter
    assert drafter is not None
    name = engine.add([5] * 300, seeded(max_tokens=3, acceptance="rejection"))
    most = 0
    while engine.has_work:
        engine.step()
        for request in engine.scheduler.running:
            states = drafter._progress[request.id].states
            most = max(most, *(each.untyped_storage().nbytes() for each in states))
    assert not drafter._progress and not drafter._probs and engine.collect(name)
    assert 0 < most < 300 * SIZES["hidden_size"] * 8 / 4, "a slice keeps the prompt's states"


@pytest.mark.parametrize("speculate", [0, 3])
def test_samples_of_one_prompt_read_it_once(speculate: int, tiny: Tiny) -> None:
    """Regression: all n were admitted at once, before there was anything to find."""
    prompt = [*make_prompts()[5], *make_prompts()[6]]
    expected = ids_of(run(start(soft(tiny), prefix_caching=False), [prompt], seeded(n=4)))
    engine = start(soft(tiny), speculate=speculate)
    (result,) = run(engine, [prompt], seeded(n=4))
    assert ids_of([result]) == expected
    covered = (len(prompt) - 1) // 4 * 4
    assert [o.stats.num_cached_tokens for o in result.outputs] == [0, *[covered] * 3]
    assert engine.stats.prompt_tokens == len(prompt) + 3 * (len(prompt) - covered)
    assert engine.stats.cached_tokens == 3 * covered


def test_samples_wait_for_the_first_one_even_if_it_loses_its_memory_or_leaves(
    tiny: Tiny,
) -> None:
    engine = start(soft(tiny), speculate=3, slots=60, max_batched_tokens=7)
    prompt = [*make_prompts()[5], *make_prompts()[4]]
    names = [engine.add(prompt, seeded(n=3, seed=seed)) for seed in range(3)]
    engine.step()
    engine.abort(names[1])
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    for name in names:
        reasons = {output.finish_reason for output in engine.collect(name).outputs}
        assert reasons == ({"abort"} if name == names[1] else {"length"})
    assert (len(engine._groups), engine.pool.num_used) == (0, 0)


def test_token_ids_in_and_out_need_no_tokenizer(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing one takes seconds, which users who do not need it should not wait for."""

    def unwanted(reader: PromptReader) -> None:
        raise AssertionError("a tokenizer was asked for")

    monkeypatch.setattr(PromptReader, "tokenizer", property(unwanted))
    engine = start(soft(tiny), speculate=1)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    assert len(engine.generate([[3, 4, 5]], params)[0].outputs[0].token_ids) == 4
    with pytest.raises(AssertionError, match="asked for"):
        engine.generate(["wordax"], params)


def test_what_another_request_reads_is_cached_in_the_next_step(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the head reads a prompt after the trunk, and what it had read was not cached."""
    monkeypatch.setattr(kv_cache, "_WORTH_WAITING", 16)
    engine = start(soft(tiny), speculate=3)
    shared = [3 + i % 50 for i in range(48)]
    asked = [engine.add([*shared, own], seeded(max_tokens=4)) for own in (7, 8, 9)]
    while engine.has_work:
        engine.step()
    cached = [engine.collect(name).outputs[0].stats.num_cached_tokens for name in asked]
    assert cached == [0, 48, 48]
