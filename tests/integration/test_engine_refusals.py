"""What cannot be answered is refused, with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from support.engine_runs import VOCAB, checkpoint, seeded, soft, start
from support.tiny_fixture import Tiny

from headstart.engine.engine import Engine
from headstart.errors import ConfigError, PromptTooLong, RequestError
from headstart.sampling.params import SamplingParams


@pytest.fixture(scope="module")
def drafting(tiny: Tiny) -> Engine:
    return start(soft(tiny), speculate=3)


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "empty": ([], {}, RequestError, "the prompt is empty"),
    "id too high": ([3, VOCAB], {}, RequestError, "outside 0 to 63"),
    "id below zero": ([3, -1], {}, RequestError, "outside 0 to 63"),
    "not ids": ([3, "x"], {}, RequestError, "a list of token ids, or a list of messages"),
    "too long": ([3] * 2000, {}, PromptTooLong, "2000 tokens; prompt and answer together may have"),
    "draft vocabulary": ([3], {"draft_vocab": "short"}, RequestError, "is called 'short'"),
    "auto in a fixed engine": ([3], {"speculate": "auto"}, RequestError, "give a number"),
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
    """Regression: a chosen id that looked like a made one kept other requests out."""
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


def test_drafts_asked_of_an_engine_without_a_head_are_refused(tiny: Tiny) -> None:
    engine = start(soft(tiny), speculate=0)
    with pytest.raises(RequestError, match=r"asks for speculate 2 .* without a head"):
        engine.add([5, 6], SamplingParams(speculate=2))
    engine.add([5, 6], SamplingParams(speculate=0, max_tokens=1))
    assert engine.has_work


@pytest.mark.parametrize("priority", ["high", 1.5, True, None, 11, -11, -(2**63)])
def test_a_priority_that_is_no_small_number_is_refused(priority: Any, drafting: Engine) -> None:
    """Regression: a text as priority stopped the scheduler for all requests."""
    with pytest.raises(RequestError, match="give a whole number from -10 to 10, smaller is more"):
        drafting.add([3], seeded(), priority=priority)
    assert not drafting.has_work


def test_collecting_what_is_unknown_or_unfinished_is_refused_and_stops_nothing(
    drafting: Engine,
) -> None:
    with pytest.raises(RequestError, match="no request is called 'nobody'"):
        drafting.collect("nobody")
    name = drafting.add([3], seeded(max_tokens=6))
    drafting.step()
    with pytest.raises(RequestError, match="still running"):
        drafting.collect(name)
    while drafting.has_work:
        drafting.step()
    assert len(drafting.collect(name).outputs[0].token_ids) == 6
    with pytest.raises(RequestError, match="was collected"):
        drafting.collect(name)


def test_generate_answers_all_prompts_or_queues_none(drafting: Engine) -> None:
    """Regression: prompts before a bad one ran on, and could not be collected."""
    with pytest.raises(RequestError, match="outside 0 to 63"):
        drafting.generate([[5, 6], [VOCAB]], seeded())
    with pytest.raises(RequestError, match="2 prompts came with 1 sampling parameters"):
        drafting.generate([[5, 6], [7]], [seeded()])
    with pytest.raises(RequestError, match="is in use"):
        drafting.generate([[5, 6], [7]], seeded(), request_id="one for two")
    assert (drafting.has_work, len(drafting._groups), drafting.pool.num_used) == (False, 0, 0)


def test_an_answer_that_is_interrupted_leaves_nothing_behind(
    drafting: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(works: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(drafting.backend, "trunk_pass", interrupt)
        with pytest.raises(KeyboardInterrupt):
            drafting.generate([[5, 6], [7]], seeded())
    assert (drafting.has_work, len(drafting._groups), drafting.pool.num_used) == (False, 0, 0)
