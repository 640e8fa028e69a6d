"""Drafts copied from the context in device rounds; interpreted on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.copying_runs import assert_copies_are_alive
from support.engine_runs import ids_of, run
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

pytest.importorskip("triton")

from support.copying_rounds import asked, prompts_of, start, take_all, texts_of
from support.kernel_runs import BLOCK_BYTES, SIZES

from headstart.backends.cuda.device_rounds import CapturedRounds
from headstart.backends.cuda.round_profile import copying_shapes
from headstart.backends.cuda.rounds import run_round
from headstart.backends.cuda.shapes import TrunkShape
from headstart.copying.drafts import Copy
from headstart.engine.engine import Engine

pytestmark = pytest.mark.usefixtures("quick_kernels", "no_clock")


@pytest.fixture(scope="module")
def folder(tiny: Tiny) -> Path:
    return tiny("mimo", rate=0.9, seed=1, dtype="F32", **SIZES)


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    return prompts_of(folder)


# drafts of the head, whether it must agree with copies, sampling
CASES: list[tuple[int, bool, dict[str, Any]]] = [
    (1, False, {}),
    (2, True, {}),
    (0, False, {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.1}),
    (1, False, {"temperature": 0.7, "seed": 3, "logprobs": 1}),
]


@pytest.mark.parametrize(("drafts", "confirmed", "fields"), unless_long(CASES[:1], CASES))
def test_rounds_copy_and_the_text_stays_the_same(
    folder: Path, prompts: list[list[int]], drafts: int, confirmed: bool, fields: dict[str, Any]
) -> None:
    params = asked(**fields)
    engine = start(folder, max_running_requests=2)  # the third one comes when another has left
    take_all(engine, drafts=drafts, confirmed=confirmed)
    results = run(engine, prompts, params)
    assert ids_of(results) == texts_of(folder, prompts, params)
    stats = engine.stats
    assert stats.fast_rounds and not stats.slow_rounds
    assert 0 < stats.copied_accepted < stats.copied_drafts
    assert_copies_are_alive(results)
    if confirmed:
        pairs = {
            pair for r in results
            for pair in zip(r.outputs[0].origins, r.outputs[0].origins[1:], strict=False)
        }  # fmt: skip
        assert ("accepted", "copied") in pairs


def test_a_model_without_a_head_copies_in_rounds(folder: Path, prompts: list[list[int]]) -> None:
    params = asked(unless_long(12, 40))
    engine = start(folder, speculate="context", max_running_requests=2)
    assert engine.model.head is None
    take_all(engine, drafts=0, copied=16)
    results = run(engine, prompts, params)
    assert ids_of(results) == texts_of(folder, prompts, params)
    assert engine.stats.copied_accepted > 0 and not engine.stats.slow_rounds
    assert max(k for r in results for k, _ in r.stats.rounds) > 8


HYBRID: dict[str, Any] = {
    **SIZES, "intermediate_size": 32, "num_hidden_layers": 2, "linear_key_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 12,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2,
}  # fmt: skip


def test_requests_of_a_model_with_recurrent_layers_copy_as_many(tiny: Tiny) -> None:
    folder, params = tiny("qwen3_5_text", rate=0.9, seed=0, dtype="F32", **HYBRID), asked(20)
    settings: dict[str, Any] = {"kv_bytes": 1 << 20, "max_running_requests": 2}
    plain = Engine(folder, dtype="float32", speculate=0, kernels="off", block_size=4, **settings)
    (said,) = ids_of(run(plain, [[9, 10, 11]], asked(20)))
    prompt = [9, 10, 11, *said, 1, 9, 10, 11]
    engine = start(folder, **settings)
    take_all(engine, drafts=1, copied=16)
    results = run(engine, [prompt, prompt[:-1]], params)
    assert ids_of(results) == ids_of(run(plain, [prompt, prompt[:-1]], params))
    assert engine.stats.copied_accepted > 0 and not engine.stats.slow_rounds
    assert max(k for r in results for k, _ in r.stats.rounds) > 8
    compiled = copying_shapes(device_of(engine))
    assert [(one.count, one.num_rows, one.packed) for one in compiled] == [(1, 17, 0), (2, 17, 0)]


class Classes:
    """A grammar: a token of another class follows each, which leaves three of four."""

    def __init__(self, last: int = 0):
        self.last = last

    def allowed(self) -> torch.Tensor:
        return torch.arange(SIZES["vocab_size"]) % 4 != self.last

    def accept(self, token: int) -> bool:
        fits, self.last = token % 4 != self.last, token % 4
        return fits

    def fork(self) -> Classes:
        return Classes(self.last)


@pytest.mark.parametrize("squeezes", unless_long([True], [False, True]))
@pytest.mark.parametrize("temperature", unless_long([0.0], [0.0, 1.0]))
def test_requests_with_a_grammar_copy_what_it_lets_through(
    folder: Path, temperature: float, squeezes: bool
) -> None:
    """Regression: those that drafted from their context alone were decided by the host."""
    plain = Engine(folder, dtype="float32", speculate=0, kernels="off", kv_bytes=200 * BLOCK_BYTES)
    params, begin = asked(20, temperature=temperature, seed=3), [9, 10, 11]
    (said,) = ids_of(run(plain, [begin], params, grammar=Classes()))
    wrong = [(t + 4) % 64 if i % 9 == 4 else t for i, t in enumerate(said)]  # of the same class
    prompts = [[*begin, *said, 1, *begin], [*begin, *wrong, 2, *begin]]
    wanted = ids_of(run(plain, prompts, params, grammar=Classes()))
    for source in unless_long(["context"], ["auto", "context"]):
        engine = start(folder, max_running_requests=2 if squeezes else 8)
        take_all(engine, drafts=1, copied=16)
        own = replace(params, draft_from=source)
        results = run(engine, prompts, own, grammar=Classes())
        assert ids_of(results) == wanted
        stats = engine.stats
        assert 0 < stats.copied_accepted < stats.copied_drafts and not stats.slow_rounds


@pytest.mark.parametrize("drafts", unless_long([1], [0, 1]))
def test_requests_by_the_rejection_rule_copy_in_rounds(
    folder: Path, prompts: list[list[int]], drafts: int
) -> None:
    engine = start(folder, max_running_requests=2)
    take_all(engine, drafts=drafts, copied=16)
    own = asked(24, acceptance="rejection")
    results = run(engine, prompts, own)
    assert ids_of(results) == texts_of(folder, prompts, asked(24)), "greedy: certain choices"
    take_all(engine, drafts=0, copied=16)  # as it is for requests that say `context`
    found = run(engine, prompts, replace(own, temperature=1.0, seed=2, draft_from="context"))
    origins = {origin for r in found for origin in r.outputs[0].origins}
    assert {"copied", "recovered"} <= origins and not engine.stats.slow_rounds


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize("drafts", [0, 1])
def test_the_rejection_rule_sees_the_drafts_of_the_head_before_copies(
    folder: Path, prompts: list[list[int]], drafts: int, acceptance: Any
) -> None:
    """Regression: a copy instead of them counted as the head's where both agreed, so that the rule
    accepted it too often."""
    engine = start(folder)
    take_all(engine, drafts=drafts)
    engine.add(prompts[0], asked(temperature=1.0, seed=2, acceptance=acceptance))
    loop = engine.loop
    assert loop.rounds is not None and loop.sources is not None
    while not loop.rounds.requests:
        engine.step()
    (one,) = loop.rounds.requests
    loop.sources.copies._copies[one.id] = Copy([1, 2, 3], 5)  # found while the host ran it
    _, given = loop.sources.for_rounds([one], len(loop.scheduler.running))
    assert given.tokens[one].confirmed == (acceptance == "rejection" and drafts > 0)


def test_where_all_draft_as_many_a_request_for_copies_keeps_to_rounds(
    folder: Path, prompts: list[list[int]]
) -> None:
    """Regression: beside a fixed number of drafts such a request was decided by the host."""
    engine = start(folder, speculate=3, max_running_requests=2)
    both, params = [prompts[0], prompts[-1]], [asked(24, draft_from="context"), asked(12)]
    own, other = run(engine, both, params)
    wanted = [*texts_of(folder, both[:1], asked(24)), *texts_of(folder, both[1:], asked(12))]
    assert ids_of([own, other]) == wanted
    assert not own.stats.num_drafted and other.stats.num_drafted
    assert engine.stats.fast_rounds and not engine.stats.slow_rounds


@pytest.mark.parametrize("drafts", unless_long([2], [0, 1, 2]))
def test_rounds_copy_no_more_than_a_request_asks_for(
    folder: Path, prompts: list[list[int]], drafts: int
) -> None:
    engine = start(folder)
    params = asked(unless_long(10, 24), draft_from="context", speculate=drafts)
    (result,) = run(engine, prompts[:1], params)
    assert max(k for k, _ in result.stats.rounds) == drafts
    assert (result.stats.copied_accepted > 0) == (drafts > 0)
    assert engine.stats.fast_rounds and not engine.stats.slow_rounds


def test_rounds_copy_from_other_answers_of_the_same_salt(folder: Path) -> None:
    lone, params = [[9, 10, 11]], asked(unless_long(16, 24), temperature=0.8, seed=3)
    engine = start(folder, draft_from_answers=2, max_running_requests=2)
    take_all(engine, drafts=1, copied=16)
    found = [run(engine, lone, params, cache_salt=salt) for salt in ("a", "a", "b")]
    assert ids_of([one for (one,) in found]) == texts_of(folder, lone, params) * 3
    first, again, other = (one.stats.copied_accepted for (one,) in found)
    assert again > first + 3 and other == first and not engine.stats.slow_rounds


def device_of(engine: Engine) -> CapturedRounds:
    assert engine.loop.rounds is not None
    device = engine.loop.rounds._device
    assert isinstance(device, CapturedRounds)
    return device


def squeezed(engine: Engine) -> set[int]:
    """Rows of the passes in which only requests that copy had rows for what they copied."""
    return {
        part.rows for part in device_of(engine).graphs._runs
        if isinstance(part, TrunkShape) and part.rows and not part.groups
    }  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    unless_long(
        [{}], [{}, {"temperature": 0.7, "seed": 3}, {"temperature": 1.0, "top_p": 0.9, "seed": 4}]
    ),
)
def test_requests_that_copy_nothing_have_no_rows_for_copies(
    folder: Path, prompts: list[list[int]], fields: dict[str, Any]
) -> None:
    beside = [*prompts, *([number, number + 9] for number in range(20, unless_long(21, 24)))]
    engine, params = start(folder, max_running_requests=len(beside)), asked(**fields)
    take_all(engine, drafts=1, copied=16)
    results = run(engine, beside, params)
    assert ids_of(results) == texts_of(folder, beside, params)
    assert squeezed(engine) and max(squeezed(engine)) < len(beside) * 17
    assert engine.stats.copied_accepted > 0 and not engine.stats.slow_rounds
    most = max(k for r in results for k, _ in r.stats.rounds)
    assert most == 8 if "top_p" in fields else most > 8, "processed logits have room for fewer"


@pytest.mark.parametrize(("rows", "most"), unless_long([(6, 5)], [(1, 3), (6, 5), (30, 16)]))
def test_where_a_pass_has_rows_for_fewer_drafts_all_that_copy_have_fewer(
    folder: Path, prompts: list[list[int]], rows: int, most: int
) -> None:
    beside, params = [prompts[0]] * 2, asked(unless_long(8, 40))
    engine = start(folder, max_running_requests=2)
    take_all(engine, drafts=1, copied=16, rows=rows)
    results = run(engine, beside, params)
    assert ids_of(results) == texts_of(folder, beside, params)
    assert engine.stats.copied_accepted > 0 and not engine.stats.slow_rounds
    assert max(k for r in results for k, _ in r.stats.rounds) == most, (
        "of passes of 8, 12 and 34 rows"
    )


@pytest.mark.parametrize("drafts", unless_long([2], [0, 2]))
def test_preemption_prefix_hits_and_aborts_change_no_text(
    folder: Path, prompts: list[list[int]], drafts: int
) -> None:
    params = asked(unless_long(8, 24), temperature=0.8, seed=5)
    (text, *_) = prompts
    some = unless_long([[*text[:12], *text[:3]], [*text[:10], *text[:3]]], prompts)
    plain = texts_of(folder, some, params)
    engine = start(folder, kv_bytes=unless_long(9, 24) * BLOCK_BYTES)
    take_all(engine, drafts=drafts, copied=16)
    first = run(engine, some, params)
    doomed = [engine.add([*prompt, 1], params) for prompt in some]
    for _ in range(unless_long(3, 6)):
        engine.step()
    for name in doomed:
        engine.abort(name)
    again = run(engine, some, params)
    engine.scheduler.check()
    assert ids_of(first) == ids_of(again) == plain
    assert engine.stats.preemptions > 0 and engine.stats.cached_tokens > 0
    assert engine.stats.copied_accepted > 0
    assert engine.loop.sources is not None and not engine.loop.sources.copies._texts


def test_rounds_that_are_compiled_at_the_start_are_those_that_run(folder: Path) -> None:
    device = device_of(start(folder, max_running_requests=2))
    shapes = copying_shapes(device)
    assert [(shape.count, shape.num_rows) for shape in shapes] == [(1, 9), (1, 17), (2, 9), (2, 17)]
    with torch.inference_mode():
        for shape in unless_long(shapes[-2:-1], shapes):
            assert bool(shape.packed) == (shape.count > 1)
            run_round(device.graphs.model, device.batch, shape)
    assert device.batch.emitted[:, 0].tolist() == [0, 0], "no request takes part"
