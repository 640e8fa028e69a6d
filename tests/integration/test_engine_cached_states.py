"""What a cached block holds, in trunk and head, is what a computation from scratch would give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_runs import checkpoint, greedy, make_prompts, run, soft, start
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

from headstart.backends.base import CacheSizes
from headstart.backends.torch.backend import TorchBackend
from headstart.engine import core
from headstart.engine.engine import Engine
from headstart.engine.memory import Memory
from headstart.sampling.params import SamplingParams

TOLERANCE = {"atol": 1e-10, "rtol": 1e-10}


def contents(engine: Engine, block: int, first_slot: int) -> dict[str, torch.Tensor]:
    """Everything that a hit on `block` would read; slots that the head leaves empty are skipped."""
    backend, size = engine.backend, engine.options.block_size
    assert isinstance(backend, TorchBackend)
    begin = block * size
    found = {}
    for layer, cache in enumerate(backend.memory.trunk):
        found[f"trunk layer {layer} K"] = cache.k[begin : begin + size]
        found[f"trunk layer {layer} V"] = cache.v[begin : begin + size]
    for module, cache in enumerate(backend.memory.head):
        skipped = min(size, max(0, module + 1 - first_slot))
        found[f"module {module} K"] = cache.k[begin + skipped : begin + size]
        found[f"module {module} V"] = cache.v[begin + skipped : begin + size]
        # what feeds the slot after the block, if that slot is not one of the empty ones
        if first_slot + size >= module + 1:
            found[f"module {module} state"] = backend.boundary(block)[module]
    return found


def compare(used: Engine, fresh: Engine, texts: list[list[int]]) -> int:
    """Blocks of `used` that hold parts of `texts`, against `fresh`, which computes them plainly."""
    compared: set[int] = set()
    size = used.options.block_size
    for text in texts:
        fresh.pool.drop_cache()
        run(fresh, [text], greedy(1))
        padded = [*text, 0]
        ours, theirs = used.pool.match(padded), fresh.pool.match(padded)
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
            expected = contents(fresh, other, index * size)
            for name, value in contents(used, mine, index * size).items():
                # as torch.testing.assert_close, whose many questions take most of the time here
                assert value.shape == expected[name].shape
                if not torch.allclose(value, expected[name], **TOLERANCE):
                    message = f"block {index} of a text of {len(text)}: {name}"
                    torch.testing.assert_close(
                        value, expected[name], **TOLERANCE, msg=lambda m, w=message: f"{w}: {m}"
                    )
            compared.add(mine)
    return len(compared)


HEADS: dict[str, tuple[str, int, str | None]] = {
    "mimo": ("mimo", 1, None),
    "qwen3": ("qwen3", 1, None),
    "three chained": ("mimo", 3, "chained"),
    "three parallel": ("mimo", 3, "parallel"),
}


def folder_of(tiny: Tiny, head: str) -> tuple[Path, str | None]:
    family, modules, topology = HEADS[head]
    count = {"num_nextn_predict_layers": modules} if modules > 1 else {}
    return soft(tiny, family, **count), topology


SIZES = [(4, 512, 1200, 3), (4, 9, 1200, 2), (4, 24, 80, 5), (16, 40, 300, 3), (3, 7, 90, 1),
         (2, 20, 1200, 4), (1, 6, 1200, 3), (1, 30, 90, 2)]  # fmt: skip
ALL = [(head, *sizes) for sizes in SIZES for head in HEADS]
# Every size with one of the heads, every head with two of the sizes.
SOME = [case for number, case in enumerate(ALL) if number % 16 in (0, 5)]


@pytest.mark.parametrize(
    ("head", "size", "rows", "slots", "speculate"), unless_long(SOME, ALL), ids=str
)
def test_cached_blocks_equal_a_recomputation(
    head: str, size: int, rows: int, slots: int, speculate: int, tiny: Tiny
) -> None:
    folder, topology = folder_of(tiny, head)
    settings: dict[str, Any] = {"topology": topology, "block_size": size}
    used = start(
        folder, speculate=speculate, max_batched_tokens=rows, slots=slots, **settings
    )  # fmt: skip
    texts = answered(used)
    fresh = start(folder, speculate=1, slots=1500, **settings)
    assert compare(used, fresh, texts) >= (3 if slots < 400 else 10)


def answered(engine: Engine) -> list[list[int]]:
    """Prompts with their answers; some begin with what others left."""
    first = make_prompts()
    # two more that share only one and two tokens with the first
    prompts = [*first, [first[0][0], 33, 34, 35, 36], [*first[0][:2], 33, 34, 35]]
    params = [
        SamplingParams(seed=i, max_tokens=8 + i, ignore_eos=True, temperature=0.5 * (i % 2))
        for i in range(len(prompts))
    ]
    # Twice: the second time begins from hits, whose blocks others made.
    results = run(engine, prompts, params) + run(engine, prompts[::-1], params)
    assert engine.stats.cached_tokens > 0
    return [r.prompt_token_ids + output.token_ids for r in results for output in r.outputs]


# Windows, sinks and parallel modules; chained ones with windows; streams, with recurrent layers, a
# choice of pools, entries of windows, a choice of tokens; norms behind attention.
OTHERS = ("mimo_v2", "step3p5", "glm5_next", "qwen4_exp", "deepseek_v4", "hy_v4", "exaone4_5")


@pytest.mark.parametrize("family", unless_long(OTHERS[:1], OTHERS))
def test_cached_blocks_of_other_families_equal_a_recomputation(
    family: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory for two requests, and blocks larger and smaller than windows."""
    folder = soft(tiny, family)
    for size, drafts in ((3, 5), (16, 2)):
        sizes = CacheSizes(-(-90 // size), size, 40)
        settings: dict[str, Any] = {"block_size": size, "kernels": "off"}
        with monkeypatch.context() as patch:
            patch.setattr(core, "plan_memory", lambda needs, options, own=sizes: Memory(own, needs))
            used = start(folder, speculate=drafts, max_batched_tokens=24, **settings)
        texts = answered(used)
        assert used.stats.preemptions > 0, "memory was not tight"
        fresh = start(folder, speculate=1, kv_bytes=1 << 24, **settings)
        assert compare(used, fresh, texts) >= 3


def test_requests_that_never_draft_leave_the_same_states(tiny: Tiny) -> None:
    folder, _ = folder_of(tiny, "mimo")
    used = start(folder, speculate=3)
    results = run(used, make_prompts(), greedy(12, speculate=0))
    assert used.stats.acceptance.drafted == []
    texts = [r.prompt_token_ids + r.outputs[0].token_ids for r in results]
    assert compare(used, start(folder, speculate=1), texts) >= 10


def test_a_block_that_kept_a_guess_would_be_noticed(tiny: Tiny) -> None:
    """The control: one value of one head entry, and one boundary state."""
    folder, _ = folder_of(tiny, "mimo")
    for spoil in ("entry", "state"):
        used = start(folder, speculate=3)
        assert isinstance(used.backend, TorchBackend)
        prompt = make_prompts()[0]
        run(used, [prompt], greedy(12))
        block = used.pool.match([*prompt, 0])[1]
        if spoil == "entry":
            used.backend.memory.head[0].v[block * 4 + 1] += 1e-6
        else:
            used.backend.boundary(block)[0] += 1e-6
        with pytest.raises(AssertionError, match="module 0"):
            compare(used, start(folder, speculate=1), [prompt])


def test_drafting_after_a_hit_counts_as_without_one(tiny: Tiny) -> None:
    """A hit that lost the state at its end would still give the right text, with worse drafts."""
    folder = checkpoint(tiny)
    prompt = make_prompts()[5]
    counters = []
    for caching in (True, False):
        engine = start(folder, speculate=3, prefix_caching=caching)
        run(engine, [prompt], greedy(16))
        again = run(engine, [prompt], greedy(16))[0]
        assert (again.stats.num_cached_tokens > 0) == caching
        counters.append(again.stats.acceptance)
    assert counters[0] == counters[1]
