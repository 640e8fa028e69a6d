"""Models with several residual streams in the engine: one text for every K, whatever memory does,
with heads that agree now and then; and what a head with its parts exchanged would accept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_runs import (
    VOCAB,
    assert_head_is_alive,
    checkpoint,
    greedy,
    ids_of,
    make_prompts,
    run,
    seeded,
    soft,
    start,
)
from support.head_edits import edited, published
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

from headstart.backends.base import CacheSizes
from headstart.checkpoint.reader import Checkpoint
from headstart.engine import core
from headstart.engine.engine import Engine
from headstart.engine.memory import Memory
from headstart.errors import ConfigError
from headstart.models.build import build
from headstart.models.documents import Documents, Passage
from headstart.models.recurrence import LayerStates, SlotRecurrence, StateSpan, empty_states
from headstart.simulate.probe import probe

FAMILIES = ("deepseek_v4", "hy_v4", "glm5_next", "qwen4_exp")
PROMPTS = make_prompts()
# K, block size, rows per step, blocks, states of recurrent layers
SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    "K=1, blocks of one": (1, 1, 40, 70, 30),
    "K=2, chunks of five rows": (2, 3, 5, 15, 20),
    "K=3, all at once": (3, 4, 512, 500, 80),
    "K=4, little memory": (4, 3, 16, 25, 40),
}
# Most of what is tried below does not depend on how layers write to streams; the first one makes
# entries of windows, the last one has recurrent layers and states of more than one kind. Heads of
# both carry streams.
closely = pytest.mark.parametrize(
    "family", unless_long((FAMILIES[0], FAMILIES[-1]), FAMILIES), indirect=True, scope="module"
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tiny: Tiny) -> Path:
    return checkpoint(tiny, family)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Without drafts and without hits."""
    plain = start(folder, speculate=0, prefix_caching=False, slots=4000)
    return ids_of(run(plain, PROMPTS, greedy(14)))


def shaped(folder: Path, shape: str, **settings: Any) -> Engine:
    k, size, rows, blocks, states = SHAPES[shape]
    with pytest.MonkeyPatch.context() as patch:
        sizes = CacheSizes(blocks, size, states)
        patch.setattr(core, "plan_memory", lambda needs, options: Memory(sizes, needs))
        return start(folder, speculate=k, block_size=size, max_batched_tokens=rows, **settings)


@pytest.mark.parametrize("shape", unless_long(list(SHAPES)[-1:], list(SHAPES)))
def test_greedy_text_does_not_depend_on_k_or_memory(
    shape: str, folder: Path, expected: list[list[int]]
) -> None:
    engine = shaped(folder, shape)
    results = run(engine, PROMPTS, greedy(14))
    assert ids_of(results) == expected
    assert_head_is_alive(results)
    if "all at once" not in shape:
        assert engine.stats.cached_tokens > 0, "no prefix was reused"
        assert engine.stats.preemptions > 0, "memory was not tight"


@closely
def test_sampled_text_depends_on_the_seed_and_not_on_k(family: str, tiny: Tiny) -> None:
    model, prompts = soft(tiny, family), PROMPTS[:5]
    params = [seeded(seed=i, temperature=(0.6, 1.0, 1.3)[i % 3], max_tokens=12) for i in range(5)]
    plain = start(model, speculate=0)
    alone = [ids_of(run(plain, [p], own))[0] for p, own in zip(prompts, params, strict=True)]
    assert ids_of(run(shaped(model, "K=4, little memory"), prompts, params)) == alone


@closely
def test_aborted_neighbours_change_nothing(folder: Path, expected: list[list[int]]) -> None:
    engine = shaped(folder, "K=4, little memory")
    ids = [engine.add(prompt, greedy(14)) for prompt in PROMPTS]
    dropped = set(ids[1::3])
    for step in range(1000):
        if not engine.has_work:
            break
        if step in (2, 4, 6) and dropped:
            engine.abort(dropped.pop())
        engine.step()
        engine.scheduler.check()
    assert engine.pool.num_used == 0
    kept = [i for i in range(len(ids)) if i % 3 != 1]
    found = [engine.collect(ids[i]).outputs[0].token_ids for i in kept]
    assert found == [expected[i] for i in kept]


def _exchanged(folder: Path, out: Path) -> Path:
    """The head with the two halves of its fusion exchanged, or its two projections."""

    def swap(own: dict[str, torch.Tensor]) -> None:
        for one, other in (("mtp.fc_embedding", "mtp.fc_hidden"), ("mtp.0.e_proj", "mtp.0.h_proj")):
            if f"{one}.weight" in own:
                both = own[f"{one}.weight"], own[f"{other}.weight"]
                own[f"{other}.weight"], own[f"{one}.weight"] = both
                return
        name = published(folder, "fuse.weight")
        own[name] = own[name].roll(own[name].shape[0], dims=1).contiguous()

    return edited(folder, out, change=swap)


def test_the_head_agrees_now_and_then_and_not_with_its_parts_exchanged(
    folder: Path, tmp_path: Path
) -> None:
    prompts = [[a, b, a + b, 2 * a % VOCAB] for a in range(2, 26, 2) for b in (3, 17)]
    rates = []
    for model in (folder, _exchanged(folder, tmp_path / "exchanged")):
        engine = start(model, speculate=3, slots=4000)
        run(engine, prompts, greedy(12))
        rates.append(engine.stats.acceptance.conditional)
    assert all(0.2 <= rate <= 0.9 for rate in rates[0]), rates[0]
    assert rates[1][0] < rates[0][0] / 2, rates


@closely
def test_exact_gives_the_same_bits_in_every_batch(folder: Path) -> None:
    found = []
    for k, rows in ((0, 512), (3, 40)):
        engine = start(folder, speculate=k, dtype="float32", exact=True, max_batched_tokens=rows)
        results = run(engine, PROMPTS[:4], greedy(8, logprobs=1))
        found.append([output.logprobs for result in results for output in result.outputs])
    assert found[0] == found[1] and found[0][0]


def test_kernels_refuse_them_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"models have several residual streams\. Use kernels"):
        start(folder, kernels="on", dtype="float32")


@closely
def test_the_probe_tries_the_states_that_streams_have(folder: Path) -> None:
    """Before the final norm they are one row, too; a head that carries them has no other way."""
    report = probe(build(Checkpoint.open(folder), device="cpu", dtype="float32"))
    assert report.verdict in ("registry", "unclear"), report.said  # norms of made heads do little
    assert report.variants[0].contract["fuse_order"] == report.registry["fuse_order"]
    assert {variant.contract["trunk_hidden"] for variant in report.variants} in (
        {"after_final_norm", "before_final_norm"}, {"before_hc_head"},
    )  # fmt: skip


@closely
def test_entries_are_not_said_to_be_8_bit_floats(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype fp8 was asked for and .* models keep "):
        start(folder, kv_dtype="fp8", dtype="float32")


@torch.inference_mode()
def from_scratch(engine: Engine, tokens: list[int]) -> list[LayerStates]:
    """States of every recurrent layer after these tokens, row by row in one go."""
    trunk, config = engine.model.trunk, engine.model.config
    span = StateSpan(0, len(tokens), None, ((len(tokens), 0),))
    states, contexts = [], list[Any]()
    for kind in config.layers:
        if kind.mixer == "delta" and config.delta is not None:
            more = config.more_states(kind)
            states.append(empty_states(config.delta, 1, torch.float64, torch.device("cpu"), more))
            contexts.append(SlotRecurrence(states[-1], [span], one_by_one=True))
        else:
            contexts.append(Passage(Documents((len(tokens),))))
    trunk(torch.tensor(tokens), torch.arange(len(tokens)), contexts)
    return states


@pytest.mark.parametrize(
    "family", unless_long(FAMILIES[-1:], FAMILIES[-2:]), indirect=True, scope="module"
)
def test_states_equal_a_recomputation_after_rejections_and_hits(folder: Path) -> None:
    """The memory of channels, and what an embedding of several tokens looks back at."""
    engine, checked = shaped(folder, "K=4, little memory"), 0
    for prompt in PROMPTS:
        engine.add(prompt, greedy(14))
    for step in range(1000):
        if not engine.has_work:
            break
        engine.step()
        for request in engine.scheduler.running if step % 7 == 3 else ():
            slot = request.states.slot
            if not request.num_computed or slot is None:
                continue
            expected = from_scratch(engine, request.tokens[: request.num_computed])
            for own, other in zip(engine.backend.memory.states, expected, strict=True):
                parts = zip(
                    (own.conv, own.memory, *own.more), (other.conv, other.memory, *other.more),
                    strict=True,
                )  # fmt: skip
                assert max((a[slot] - b[0]).abs().max() for a, b in parts) < 1e-10
            checked += 1
    assert checked > 5 and engine.stats.cached_tokens > 0
