"""States that an engine hands out with an answer are those of its trunk over the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_runs import (
    assert_head_is_alive,
    checkpoint,
    greedy,
    make_prompts,
    seeded,
    start,
)
from support.tiny_fixture import Tiny

from headstart.backends.numba import support
from headstart.checkpoint.reader import Checkpoint
from headstart.engine.engine import Engine
from headstart.engine.kept_states import KeptStates
from headstart.engine.output import Completion, Result
from headstart.models.documents import Documents
from headstart.models.unroll import trunk_states
from headstart.sampling.params import SamplingParams
from headstart.train.frozen_model import FrozenModel, load_frozen_model

PROMPTS = make_prompts()
ROUNDING = {"rtol": 2**-7, "atol": 1e-5}  # the last of bf16's eight digits, and fp32's beside it


def frozen(folder: Path) -> FrozenModel:
    return load_frozen_model(Checkpoint.open(folder), None, device="cpu", dtype="float64")


def answered(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, **options: Any
) -> list[Result]:
    ids = [
        engine.submit(engine.read(prompt, params), keeps_states=True, **options)
        for prompt in prompts
    ]
    while engine.has_work:
        engine.step()
    return [engine.collect(name) for name in ids]


def check(model: FrozenModel, results: Sequence[Result]) -> None:
    """Every answer has its states, up to the last token, and they are the trunk's."""
    for result in results:
        for output in result.outputs:
            ids = [*result.prompt_token_ids, *output.token_ids]
            compare(model, ids, kept(output, len(ids)))


def kept(output: Completion, num_tokens: int) -> torch.Tensor:
    assert output.states is not None
    found = output.states.of(num_tokens)
    assert found is not None and num_tokens - 1 <= len(found) <= num_tokens
    return found


def compare(model: FrozenModel, ids: list[int], found: torch.Tensor) -> None:
    wanted = trunk_states(model.trunk, torch.tensor(ids), Documents((len(ids),)), model.kind)
    torch.testing.assert_close(found.double(), wanted[: len(found)], **ROUNDING)
    shifted = torch.cat([wanted[1:], wanted[:1]])[: len(found)]  # control: of the next slot
    assert not torch.allclose(found.double(), shifted, **ROUNDING)


@pytest.mark.parametrize("family", ["mimo", "step3p5", "deepseek_v3", "qwen3_next"])
def test_states_of_answers_are_the_trunks(family: str, tiny: Tiny) -> None:
    """Three modules, states before the final norm, latent attention, recurrent layers."""
    folder = checkpoint(tiny, family)
    engine = start(folder, speculate=3, prefix_caching=False, max_batched_tokens=24)
    results = answered(engine, PROMPTS[:6], greedy(12))
    assert_head_is_alive(results)
    model = frozen(folder)
    assert results[0].outputs[0].states is not None
    assert results[0].outputs[0].states.kind == model.kind
    check(model, results)


@pytest.mark.parametrize("drafts", [0, 1, 2, 3, "auto"])
def test_every_number_of_drafts_gives_the_same_states(drafts: int | str, tiny: Tiny) -> None:
    folder = checkpoint(tiny)
    engine = start(folder, speculate="auto" if drafts == "auto" else 3, prefix_caching=False)
    params = [greedy(10), replace(seeded(temperature=0.9), n=2)]
    if drafts != "auto":
        params = [replace(each, speculate=drafts) for each in params]
    model = frozen(folder)
    for each in params:
        check(model, answered(engine, PROMPTS[:3], each))


def test_copied_drafts_and_drafts_behind_a_stop_leave_no_wrong_states(tiny: Tiny) -> None:
    folder = checkpoint(tiny)
    engine = start(folder, speculate=3, prefix_caching=False)
    said = [one.outputs[0].token_ids for one in answered(engine, PROMPTS[:4], greedy(40))]
    repeating = [[*begin, *own, *begin] for begin, own in zip(PROMPTS, said, strict=False)]
    copying = answered(engine, repeating, greedy(16, draft_from="context"))
    assert any("copied" in one.outputs[0].origins for one in copying)
    ends = [one.outputs[0].token_ids[5] for one in copying]
    stopped = answered(engine, repeating, greedy(16, stop_token_ids=tuple(ends)))
    assert any(one.outputs[0].finish_reason == "stop" for one in stopped)
    check(frozen(folder), [*copying, *stopped])


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preempted_requests_keep_what_they_had(prefix_caching: bool, tiny: Tiny) -> None:
    """Also where a restart finds its own blocks cached, whose states are not computed again."""
    folder = checkpoint(tiny)
    engine = start(folder, speculate=3, slots=64, prefix_caching=prefix_caching)
    prompts = [[2 + number, *range(9, 20)] for number in range(5)]  # nothing is shared
    results = answered(engine, prompts, greedy(16))
    assert engine.stats.preemptions > 0
    check(frozen(folder), results)


@pytest.mark.skipif(support.why_missing() is not None, reason="no numba here")
def test_compiled_kernels_hand_out_the_same(tiny: Tiny) -> None:
    folder = checkpoint(tiny)
    engine = start(folder, speculate=3, prefix_caching=False, dtype="float32", kernels="auto")
    assert engine.backend.name == "numba"
    check(frozen(folder), answered(engine, PROMPTS[:4], greedy(10)))


def test_a_prefix_hit_leaves_a_text_without_states(tiny: Tiny) -> None:
    engine = start(checkpoint(tiny), speculate=3)
    first, again = (answered(engine, [[*range(3, 30)]], greedy(6))[0] for _ in range(2))
    assert again.num_cached_tokens > 0
    (one,), (other,) = first.outputs, again.outputs
    kept(one, 33)
    assert other.states is not None and other.states.of(33) is None


def test_only_requests_that_ask_keep_states_and_ended_ones_drop_them(tiny: Tiny) -> None:
    engine = start(checkpoint(tiny), speculate=3, prefix_caching=False)
    assert engine.generate([PROMPTS[0]], greedy(4))[0].outputs[0].states is None
    name = engine.submit(engine.read(PROMPTS[0], greedy(40)), keeps_states=True)
    engine.step()
    engine.abort(name)
    assert engine.collect(name).outputs[0].states is None
    without = start(checkpoint(tiny), speculate=0)
    assert answered(without, PROMPTS[:1], greedy(4))[0].outputs[0].states is None


def test_rows_behind_a_gap_and_known_rows_are_not_kept() -> None:
    rows = torch.arange(12.0).view(6, 2)
    own = KeptStates("after_final_norm")
    own.read(3, rows[3:])
    assert own.of(6) is None and own.num_bytes == 0
    own.read(0, rows[:4])
    own.read(2, rows[2:5])
    own.read(4, rows[4:])
    found = own.of(6)
    assert found is not None and torch.equal(found.float(), rows)
    assert own.of(7) is not None and own.of(8) is None and own.num_bytes == 24
