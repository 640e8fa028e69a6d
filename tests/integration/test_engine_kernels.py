"""The engine with fused kernels and rounds that run ahead of the host; interpreted on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine_runs import assert_head_is_alive, ids_of
from support.interpreted_bf16 import repair_bf16
from support.kernel_runs import BLOCK_BYTES, SIZES
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

pytest.importorskip("triton")

from headstart.backends.cuda import exact
from headstart.backends.options import BackendOptions
from headstart.backends.select import select
from headstart.engine.engine import Engine
from headstart.errors import ConfigError
from headstart.sampling.masks import packed
from headstart.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_kernels")

PROMPTS = [
    [3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [5, 20, 31], [3, 4, 5, 6, 7, 8, 9, 10, 20], [9, 10, 11],
]  # fmt: skip


def model(tiny: Tiny) -> Path:
    return tiny("mimo", rate=0.9, seed=1, dtype="F32", **SIZES)


VOCAB = SIZES["vocab_size"]


def start(folder: Path, kernels: str, **settings: Any) -> Engine:
    settings = {"speculate": 2, "block_size": 4, "kv_bytes": 60 * BLOCK_BYTES, **settings}
    return Engine(folder, dtype="float32", kernels=kernels, **settings)


COUNT = unless_long(4, 6)  # tokens of an answer


def settings(count: int = COUNT) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True),
        SamplingParams(temperature=0.5, seed=3, max_tokens=count, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=4, top_p=0.9, max_tokens=count, ignore_eos=True),
        SamplingParams(
            temperature=0.9, seed=5, top_k=6, top_p=0.9, min_p=0.02, max_tokens=count,
            ignore_eos=True,
        ),
    ]  # fmt: skip


def test_texts_and_acceptance_are_those_of_the_plain_engine(tiny: Tiny) -> None:
    """Greedy, sampled and truncated requests share a round."""
    folder = model(tiny)
    fused, plain = start(folder, "on"), start(folder, "off")
    assert (fused.backend.name, plain.backend.name) == ("cuda", "torch")
    found, wanted = (e.generate(PROMPTS, settings()) for e in (fused, plain))
    assert ids_of(found) == ids_of(wanted)
    assert_head_is_alive(found)
    assert [r.stats.acceptance for r in found] == [r.stats.acceptance for r in wanted]
    assert [r.outputs[0].origins for r in found] == [r.outputs[0].origins for r in wanted]
    assert fused.pool.num_used == 0 and not fused.loop.rounds.requests


class EveryThird:
    """A grammar over three classes of tokens, one after another; ends after some tokens."""

    def __init__(self, limit: int = 100, state: int = 0):
        self.limit, self.state = limit, state

    def allowed(self) -> torch.Tensor:
        ids = torch.arange(VOCAB)
        return (ids % 3 == self.state % 3) & (self.state < self.limit)

    def accept(self, token: int) -> bool:
        fits = token % 3 == self.state % 3 and self.state < self.limit
        self.state += fits
        return fits

    def fork(self) -> EveryThird:
        return EveryThird(self.limit, self.state)


@pytest.mark.parametrize(
    "limit", [100, COUNT - 2], ids=["to the end of the answer", "ends by itself"]
)
def test_grammars_hold_in_rounds(tiny: Tiny, limit: int) -> None:
    """The host gives each round its masks while the trunk runs; texts are those without rounds."""
    folder = model(tiny)
    params = [replace(own, logprobs=2) for own in settings()[:2]]
    fused, plain = start(folder, "on"), start(folder, "off")
    found, wanted = (
        engine.generate(PROMPTS[:2], params, grammar=EveryThird(limit)) for engine in (fused, plain)
    )
    assert ids_of(found) == ids_of(wanted)
    texts = ids_of(found)
    assert all(token % 3 == at % 3 for text in texts for at, token in enumerate(text))
    assert [len(text) for text in texts] == [min(limit, COUNT)] * 2
    for one, other in zip(found, wanted, strict=True):
        tops = [[list(told.top) for told in r.outputs[0].logprobs or []] for r in (one, other)]
        assert tops[0] == tops[1] != []


class Anything(EveryThird):
    def allowed(self) -> torch.Tensor:
        return torch.ones(VOCAB, dtype=torch.bool)

    def accept(self, token: int) -> bool:
        return True

    def fork(self) -> Anything:
        return self


class ByState(EveryThird):
    """Another fifth of the tokens is forbidden after each token."""

    def allowed(self) -> torch.Tensor:
        return (torch.arange(VOCAB) + self.state) % 5 != 0

    def accept(self, token: int) -> bool:
        fits = bool(self.allowed()[token])
        self.state += 1
        return fits

    def fork(self) -> ByState:
        return type(self)(self.limit, self.state)


class OneMask(ByState):
    """Looks ahead no further than the next token, as a grammar that would take too long does."""

    def chain_words(self, drafts: Sequence[int]) -> list[np.ndarray | None]:
        return [packed(self.allowed())]


def test_no_draft_counts_behind_the_last_mask(tiny: Tiny) -> None:
    """A draft that fits may be accepted only where the row behind it has a mask."""
    fused, plain = start(model(tiny), "on"), start(model(tiny), "off")
    given = PROMPTS[:2], settings(8)[:2]
    wanted = ids_of(plain.generate(*given, grammar=ByState()))
    assert ids_of(fused.generate(*given, grammar=OneMask())) == wanted
    assert fused.stats.fast_rounds


def test_a_grammar_that_permits_the_text_accepts_as_without_it(tiny: Tiny) -> None:
    fused = start(model(tiny), "on")
    free = fused.generate(PROMPTS[:2], settings()[:2])
    held = fused.generate(PROMPTS[:2], settings()[:2], grammar=Anything())
    assert ids_of(held) == ids_of(free)
    assert [r.stats.acceptance for r in held] == [r.stats.acceptance for r in free]
    assert_head_is_alive(held)


class Interrupted(Anything):
    """Fails in a way that no guard expects, once."""

    def fork(self) -> Interrupted:
        return self

    def accept(self, token: int) -> bool:
        if not self.limit:
            return True
        self.limit = 0
        raise KeyboardInterrupt


def test_a_step_that_is_interrupted_leaves_no_round_behind(tiny: Tiny) -> None:
    folder = model(tiny)
    wanted = ids_of(start(folder, "off").generate(PROMPTS[:2], settings()[:2]))
    fused = start(folder, "on")
    with pytest.raises(KeyboardInterrupt):
        fused.generate(PROMPTS[:2], settings()[:2], grammar=Interrupted())
    assert ids_of(fused.generate(PROMPTS[:2], settings()[:2])) == wanted
    assert fused.pool.num_used == 0


def test_requests_leave_rounds_when_memory_runs_out(tiny: Tiny) -> None:
    folder = model(tiny)
    params = [SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)] * 3
    wanted = ids_of(start(folder, "off").generate(PROMPTS[:3], params))
    fused = start(folder, "on", kv_bytes=9 * BLOCK_BYTES)
    assert ids_of(fused.generate(PROMPTS[:3], params)) == wanted
    assert fused.stats.preemptions > 0 and fused.pool.num_used == 0


def test_a_request_may_be_aborted_while_its_round_is_under_way(tiny: Tiny) -> None:
    folder = model(tiny)
    wanted = ids_of(start(folder, "off").generate(PROMPTS[:2], settings()[:2]))
    fused = start(folder, "on")
    first, second = (fused.add(p, s) for p, s in zip(PROMPTS[:2], settings()[:2], strict=True))
    for _ in range(3):
        fused.step()
    fused.abort(first)
    while fused.has_work:
        fused.step()
        fused.scheduler.check()
    assert fused.collect(second).outputs[0].token_ids == wanted[1]
    assert fused.pool.num_used == 0


def test_a_stop_inside_a_round_ends_the_answer_there(tiny: Tiny) -> None:
    folder = model(tiny)
    whole = ids_of(start(folder, "off").generate(PROMPTS[:1], settings(7)[:1]))[0]
    params = SamplingParams(temperature=0, max_tokens=7, stop_token_ids=(whole[4],))
    result = start(folder, "on").generate(PROMPTS[:1], params)[0]
    cut = whole[: whole.index(whole[4]) + 1]
    assert result.outputs[0].token_ids == cut and result.outputs[0].finish_reason == "stop"


def test_without_a_head_rounds_have_no_drafts(tiny: Tiny) -> None:
    folder = model(tiny)
    wanted = ids_of(start(folder, "off", speculate=0).generate(PROMPTS[:2], settings()[:2]))
    fused = start(folder, "on", speculate=0)
    assert ids_of(fused.generate(PROMPTS[:2], settings()[:2])) == wanted


def test_a_request_may_ask_for_more_drafts_than_the_engine(tiny: Tiny) -> None:
    folder = model(tiny)
    each = [replace(s, speculate=k) for s, k in zip(settings(5)[:2], (3, 1), strict=True)]
    found, wanted = (
        start(folder, kernels, speculate=1).generate(PROMPTS[:2], each) for kernels in ("on", "off")
    )
    assert ids_of(found) == ids_of(wanted)
    assert [r.stats.acceptance for r in found] == [r.stats.acceptance for r in wanted]
    assert len(found[0].stats.acceptance.drafted) == 3


def test_warming_up_changes_nothing(tiny: Tiny) -> None:
    folder = model(tiny)
    wanted = ids_of(start(folder, "off").generate(PROMPTS[:1], settings(3)[:1]))
    fused = start(folder, "on", max_running_requests=1, speculate=unless_long(1, 2))
    assert fused.loop.rounds is not None
    fused.loop.rounds._device.warm_up()
    assert ids_of(fused.generate(PROMPTS[:1], settings(3)[:1])) == wanted


def test_kernels_are_refused_where_they_do_not_fit(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="kernels on was asked for and numbers are float64"):
        Engine(model(tiny), dtype="float64", kernels="on", kv_bytes=1 << 20)


@dataclass(frozen=True)
class Answers:
    texts: list[list[int]]
    logprobs: list[list[Any]]
    engine: Engine


def exact_answers(folder: Path, **settings: Any) -> Answers:
    """Tokens and log-probabilities; one request is in rounds, the other stays with the host."""
    each = [
        SamplingParams(temperature=0.5, seed=4, top_k=9, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2),
    ]
    options = {"block_size": 4, "kv_bytes": 60 * BLOCK_BYTES, **settings}
    engine = Engine(folder, dtype="bfloat16", kernels="on", exact=True, **options)
    prompts = [PROMPTS[0][:6], PROMPTS[2][:5]]
    outputs = [result.outputs[0] for result in engine.generate(prompts, each)]
    assert engine.pool.num_used == 0
    logprobs = [[(e.logprob, e.top) for e in output.logprobs or ()] for output in outputs]
    return Answers([output.token_ids for output in outputs], logprobs, engine)


def test_exact_texts_depend_on_nothing_but_the_request(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once without drafts; with drafts, prompts in chunks, and memory that runs out."""
    if not torch.cuda.is_available():
        repair_bf16(monkeypatch)
        monkeypatch.setattr(exact, "TILE", 4)  # fewer rows to fill up, or it would take a minute
    folder = tiny("mimo", rate=0.9, seed=1, dtype="F32", **SIZES, max_position_embeddings=64)
    plain = exact_answers(folder, speculate=0)
    memory = 4 * BLOCK_BYTES // 2  # bf16 takes half as much
    drafted = exact_answers(folder, speculate=3, max_batched_tokens=4, kv_bytes=memory)
    assert drafted.texts == plain.texts
    assert drafted.logprobs == plain.logprobs and plain.logprobs[1]
    stats = drafted.engine.stats
    assert stats.preemptions > 0 and 0 < stats.acceptance.cumulative[0] < 1


def test_exact_is_refused_where_kernels_would_be_needed_and_cannot_run(tiny: Tiny) -> None:
    on_gpu = replace(start(model(tiny), "off").model, device=torch.device("cuda"))
    with pytest.raises(ConfigError, match="exact and kernels off were both given on a GPU"):
        select(on_gpu, BackendOptions(exact=True, kernels="off"))
    with pytest.raises(ConfigError, match="exact needs the kernels on a GPU and numbers are"):
        select(replace(on_gpu, dtype=torch.float64), BackendOptions(exact=True))
    assert select(on_gpu, BackendOptions(exact=True)).name == "cuda"
