"""Models with recurrent layers in the engine: the text of transformers for every K, and states
that equal a computation from scratch after rejections, hits, preemptions and aborts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_runs import (
    AGREEING,
    LING,
    NEMOTRON,
    GreedyTexts,
    assert_head_is_alive,
    checkpoint,
    greedy,
    ids_of,
    make_prompts,
    published_model,
    run,
    seeded,
    start,
)
from support.head_edits import edited
from support.long_runs import IS_LONG, unless_long
from support.tiny_fixture import Tiny

from headstart.backends.base import CacheSizes
from headstart.checkpoint.reader import Checkpoint
from headstart.engine import core
from headstart.engine.engine import Engine
from headstart.engine.kv_cache import extend_digests
from headstart.engine.memory import Memory
from headstart.engine.state_cache import StatePool
from headstart.errors import ConfigError
from headstart.models.build import build
from headstart.models.documents import Documents, Passage
from headstart.models.recurrence import LayerStates, SlotRecurrence, StateSpan, empty_states
from headstart.sampling.params import SamplingParams
from headstart.simulate.probe import probe

SIZES: dict[str, Any] = {
    **AGREEING, "num_hidden_layers": 3, "linear_key_head_dim": 16, "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron_h", "bailing_moe_v3")
# Every other K and shape is compared with the first of them, where states are.
_WITH_TRANSFORMERS = ("K=0, few blocks", "K=3, all at once", "K=4, few blocks")
PROMPTS = make_prompts()
# K, block size, rows per step, blocks, states
SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    "K=0, few blocks": (0, 4, 24, 20, 16),
    "K=1, blocks of one": (1, 1, 40, 200, 30),
    "K=2, chunks of five rows": (2, 3, 5, 60, 20),
    "K=3, all at once": (3, 4, 512, 500, 80),
    "K=3, few states": (3, 4, 32, 200, 7),
    "K=4, few blocks": (4, 3, 16, 25, 40),
}


def hybrid(tiny: Tiny, family: str) -> Path:
    own = {"nemotron_h": NEMOTRON, "bailing_moe_v3": LING}.get(family)
    return tiny(family, **(SIZES if own is None else AGREEING | own))


def soft(tiny: Tiny, family: str) -> Path:
    """The same with flatter logits: at temperature 1 a sample is not simply the best token."""
    folder = hybrid(tiny, family)
    out = folder.parent / f"{folder.name}-soft"

    def flatten(own: dict[str, torch.Tensor]) -> None:
        own["lm_head.weight"] *= 0.4

    return out if out.exists() else edited(folder, out, change=flatten)


def shaped(folder: Path, shape: str, **settings: Any) -> Engine:
    k, size, rows, blocks, states = SHAPES[shape]
    with pytest.MonkeyPatch.context() as patch:
        sizes = CacheSizes(blocks, size, states)
        patch.setattr(core, "plan_memory", lambda needs, options: Memory(sizes, needs))
        return start(folder, speculate=k, block_size=size, max_batched_tokens=rows, **settings)


@torch.inference_mode()
def from_scratch(engine: Engine, tokens: list[int]) -> list[LayerStates]:
    """States of every recurrent layer after these tokens, row by row in one go."""
    trunk, config = engine.model.trunk, engine.model.config
    assert config.recurrent is not None
    states, contexts = [], []
    span = StateSpan(0, len(tokens), None, ((len(tokens), 0),))
    for kind in config.layers:
        if kind.is_recurrent:
            states.append(empty_states(config.recurrent, 1, torch.float64, torch.device("cpu")))
            contexts.append(SlotRecurrence(states[-1], [span], one_by_one=True))
        else:
            contexts.append(Passage(Documents((len(tokens),))))
    trunk(torch.tensor(tokens), torch.arange(len(tokens)), contexts)
    return states


def assert_state(engine: Engine, slot: int, tokens: list[int]) -> None:
    expected = from_scratch(engine, tokens)
    for layer, (own, other) in enumerate(zip(engine.backend.memory.states, expected, strict=True)):
        for name in ("conv", "memory"):
            ours, theirs = getattr(own, name)[slot], getattr(other, name)[0]
            difference = (ours - theirs).abs().max()
            assert difference < 1e-10, f"layer {layer} {name} after {len(tokens)}: {difference}"


def states_of(engine: Engine) -> StatePool:
    assert engine.scheduler.states is not None
    return engine.scheduler.states.pool


def check_running(engine: Engine) -> int:
    """The state of every running request against a recomputation; returns how many there are."""
    begun = [request for request in engine.scheduler.running if request.num_computed]
    for request in begun:
        assert request.states.slot is not None
        assert_state(engine, request.states.slot, request.tokens[: request.num_computed])
    return len(begun)


def check_snapshots(engine: Engine, texts: list[list[int]]) -> int:
    """Snapshots of these texts, likewise."""
    checked, size = set(), engine.options.block_size
    for text in texts:
        digests: list[bytes] = []
        extend_digests(digests, text, len(text) // size, size)
        for blocks, digest in enumerate(digests, start=1):
            slot = states_of(engine).find(digest)
            if slot is not None and slot not in checked:
                assert_state(engine, slot, text[: blocks * size])
                checked.add(slot)
    return len(checked)


@pytest.fixture(scope="module")
def published(tiny: Tiny) -> Callable[[str], GreedyTexts]:
    return cache(lambda family: GreedyTexts(published_model(hybrid(tiny, family))))


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        *(("qwen3_next", shape) for shape in _WITH_TRANSFORMERS),
        *product(FAMILIES[1:], unless_long(["K=4, few blocks"], SHAPES)),
    ],
)
def test_greedy_text_is_that_of_transformers(
    family: str, shape: str, tiny: Tiny, published: Callable[[str], GreedyTexts]
) -> None:
    prompts = [*PROMPTS, *PROMPTS[:3]]
    engine = shaped(hybrid(tiny, family), shape)
    results = run(engine, PROMPTS, greedy(12)) + run(engine, PROMPTS[:3], greedy(12))
    assert ids_of(results) == published(family).like(ids_of(results), prompts, 12)
    if "few states" not in shape:
        assert engine.stats.cached_tokens > 0, "no prefix was reused"
    if "few blocks" in shape:
        assert engine.stats.preemptions > 0, "memory was not tight"
    if SHAPES[shape][0]:
        assert_head_is_alive(results)


def params_of(count: int) -> list[SamplingParams]:
    """Hot and greedy, long and short, with and without drafts of their own."""
    return [
        SamplingParams(seed=i, max_tokens=6 + i, ignore_eos=True, temperature=i % 2,
                       speculate=(None, None, 0, 2)[i % 4])
        for i in range(count)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def sampled(tiny: Tiny) -> Callable[[str], list[list[int]]]:
    """One request at a time, without drafts and without hits."""

    def text(family: str) -> list[list[int]]:
        folder = soft(tiny, family)
        engine = start(folder, speculate=0, kv_bytes=20_000_000, prefix_caching=False)
        return [
            ids_of(run(engine, [prompt], replace(own, speculate=None)))[0]
            for prompt, own in zip(PROMPTS, params_of(len(PROMPTS)), strict=True)
        ]

    return cache(text)


_SHAPES = [shape for shape in SHAPES if shape != "K=3, all at once"]


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        *(("qwen3_next", shape) for shape in unless_long(_SHAPES[-2:], _SHAPES)),
        *(("nemotron_h", shape) for shape in unless_long(_SHAPES[-1:], _SHAPES)),
        *(("bailing_moe_v3", shape) for shape in unless_long([], _SHAPES)),
    ],
)
def test_states_equal_a_recomputation_after_every_step(
    family: str, shape: str, tiny: Tiny, sampled: Callable[[str], list[list[int]]]
) -> None:
    """Sampled text is the same for every K; aborts in between leave nothing behind."""
    said, engine = sampled(family), shaped(soft(tiny, family), shape)
    params = params_of(len(PROMPTS))
    if not SHAPES[shape][0]:
        params = [replace(own, speculate=None) for own in params]
    checked, texts = 0, [[*p, *a] for p, a in zip(PROMPTS, said, strict=True)]
    for order in (1, -1):
        ids = [engine.add(p, s) for p, s in zip(PROMPTS[::order], params[::order], strict=True)]
        doomed = [engine.add(p, seeded()) for p in PROMPTS[2:5]]
        for step in count():
            if not engine.has_work:
                break
            engine.step()
            engine.scheduler.check()
            if step % 9 == 2:
                checked += check_running(engine)
            if step in (1, 4, 9):
                engine.abort(doomed.pop())
        assert [engine.collect(i).outputs[0].token_ids for i in ids] == said[::order]
    assert checked > 5
    assert states_of(engine).num_held == 0
    assert check_snapshots(engine, texts) > 0
    assert engine.stats.cached_tokens > 0 or shape == "K=3, few states"


def test_after_a_failed_step_all_states_are_free(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: slots for drafts and snapshots of that step belonged to no request."""
    engine = shaped(hybrid(tiny, "qwen3_next"), next(s for s in SHAPES if s.startswith("K=4")))
    trunk_pass = engine.backend.trunk_pass

    def fail(requests: Any) -> Any:
        if any(rows.num_logits > 1 for rows in requests):  # drafts
            raise RuntimeError("out of memory")
        return trunk_pass(requests)

    with monkeypatch.context() as patch:
        patch.setattr(engine.backend, "trunk_pass", fail)
        engine.add(PROMPTS[0], greedy(8))
        with pytest.raises(RuntimeError, match="out of memory"):
            while engine.has_work:
                engine.step()
    assert states_of(engine).num_held > 1  # the request's own, and what the step took
    engine.recover()
    assert states_of(engine).num_held == 0
    assert len(ids_of(engine.generate(PROMPTS[:1], greedy(8)))[0]) == 8


def test_a_state_one_row_off_would_be_noticed(tiny: Tiny) -> None:
    """The control of the comparison."""
    engine = shaped(hybrid(tiny, "qwen3_next"), "K=3, all at once")
    engine.add(PROMPTS[4], greedy(8))
    engine.step()
    assert check_running(engine) == 1
    (request,) = engine.scheduler.running
    assert request.states.slot is not None
    with pytest.raises(AssertionError, match="layer 0 conv"):
        assert_state(engine, request.states.slot, request.tokens[: request.num_computed - 1])


@pytest.mark.parametrize("family", unless_long(["qwen3_next"], ["qwen3_next", "nemotron_h"]))
def test_exact_mode_gives_the_same_bits_however_rows_are_cut(family: str, tiny: Tiny) -> None:
    """States and logits of a float32 engine, by chunks of another size, with and without drafts."""
    folder = hybrid(tiny, family)
    seen = []
    for k, rows in ((0, 64), (3, 64), (2, 5)):
        engine = start(
            folder, speculate=k, max_batched_tokens=rows, kv_bytes=9_000_000, dtype="float32",
            exact=True, threads=1,
        )  # fmt: skip
        results = run(engine, PROMPTS[:4], greedy(12, logprobs=1))
        outputs = [output for result in results for output in result.outputs]
        seen.append([[one.logprob for one in output.logprobs] for output in outputs])
    assert seen[0] == seen[1] == seen[2]


def test_mamba_layers_are_refused_by_name_where_kernels_are_asked_for(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="nemotron_h models have Mamba layers"):
        start(hybrid(tiny, "nemotron_h"), kernels="on", dtype="float32")


@pytest.mark.skipif(not IS_LONG, reason="compiles products in 8 bits")
def test_mamba_layers_run_in_int8(tiny: Tiny) -> None:
    folder, said = hybrid(tiny, "nemotron_h"), []
    for weights in ("as-dtype", "int8"):
        engine = start(folder, speculate=3, dtype="float32", weights=weights, kv_bytes=9_000_000)
        assert engine.backend.name == "torch"
        said.append(ids_of(run(engine, PROMPTS, greedy(8))))
    assert said[0] == said[1]
    assert any("mamba attention" in note for note in engine.notes), engine.notes


def test_the_probe_tries_the_disputed_norm_of_nemotron_both_ways(tiny: Tiny) -> None:
    folder = checkpoint(tiny, "nemotron_h")
    report = probe(build(Checkpoint.open(folder), device="cpu", dtype="float32"))
    tried = {variant.contract["out_norm_mean"] for variant in report.variants}
    assert tried == {"kept", "subtracted"}
    assert report.verdict in ("registry", "unclear"), report.said  # norms of made heads do little
