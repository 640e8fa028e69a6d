"""K/V in 8-bit floats: the text does not depend on drafts, chunks or the backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engine_runs import (
    assert_head_is_alive,
    checkpoint,
    greedy,
    ids_of,
    make_prompts,
    run,
    seeded,
    start,
)
from support.kernel_runs import SIZES
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

pytest.importorskip("triton")

from support.interpreted_bf16 import repair_fp8

from headstart.engine.engine import Engine
from headstart.errors import ConfigError
from headstart.sampling.params import SamplingParams

FP8: dict[str, Any] = {"kv_dtype": "fp8"}


@pytest.mark.parametrize(
    ("family", "way"),
    unless_long([("mimo", "greedy"), ("qwen3_5", "seeded")],
                [(f, w) for f in ("mimo", "qwen3_5", "glm4_moe", "step3p5")
                 for w in ("greedy", "seeded")]),
)  # fmt: skip
def test_drafts_change_no_text_where_plain_modules_round(family: str, way: str, tiny: Tiny) -> None:
    folder = checkpoint(tiny, family)
    params = greedy() if way == "greedy" else seeded(temperature=0.8)
    found = []
    for drafts in unless_long((0, 4), (0, 1, 2, 3, 4)):
        engine = start(folder, speculate=drafts, **FP8)
        results = run(engine, make_prompts(), params)
        found.append(ids_of(results))
        assert any("rounded to 8-bit floats and held as float64" in note for note in engine.notes)
        if drafts == 4:
            assert_head_is_alive(results)
    assert all(ids == found[0] for ids in found[1:])


def test_chunks_and_exact_change_no_text(tiny: Tiny) -> None:
    folder = checkpoint(tiny)
    found = [
        ids_of(run(start(folder, speculate=2, **FP8, **settings), make_prompts(), greedy()))
        for settings in ({}, {"max_batched_tokens": 12}, {"exact": True, "dtype": "float32"})
    ]
    assert found[0] == found[1] == found[2]


def test_rounding_shows(tiny: Tiny) -> None:
    """The control: log-probabilities differ from those of K/V as they are, and not by much."""
    folder = checkpoint(tiny)
    params = greedy(max_tokens=1, logprobs=0)
    values = []
    for settings in ({}, FP8):
        (result,) = start(folder, speculate=0, **settings).generate(make_prompts()[-1:], params)
        assert result.outputs[0].logprobs
        values.append(result.outputs[0].logprobs[0].logprob)
    assert 1e-9 < abs(values[0] - values[1]) < 0.5


@pytest.mark.usefixtures("quick_kernels")
def test_kernels_give_the_text_of_the_plain_modules(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without drafts; and memory is planned for what is held."""
    repair_fp8(monkeypatch)
    folder = tiny("mimo", rate=0.9, seed=1, dtype="F32", **SIZES)
    options: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "block_size": 4, "kv_bytes": 1 << 18,
        "max_model_len": 32, "max_running_requests": 64,
    }  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    prompts = [[33, 11, 60], list(range(2, 22))]
    plain = Engine(folder, speculate=0, kernels="off", **options, **FP8)
    wanted = ids_of(plain.generate(prompts, params))
    for drafts in unless_long((3,), (0, 1, 2, 3, 4)):
        engine = Engine(folder, speculate=drafts, kernels="on", **options, **FP8)
        assert engine.backend.name == "cuda"
        assert any(note.startswith("K/V are 8-bit floats with a scale") for note in engine.notes)
        found = engine.generate(prompts, params)
        assert ids_of(found) == wanted
        if drafts == 3:
            assert_head_is_alive(found)
    cache = engine.backend.memory.trunk[0]
    assert cache.k.dtype == torch.int16 and cache.sizes is not None
    held = cache.k.nbytes + cache.v.nbytes + cache.sizes.nbytes
    state = SIZES["hidden_size"] * 4  # beside every block
    layers = 2  # one of the trunk, one of the head
    wanted_bytes = layers * held + engine.memory.cache.num_blocks * state
    assert engine.memory.cache.num_blocks * engine.memory.needs.block_bytes == wanted_bytes
    as_held = 2 * 16 * 4  # fp32
    assert held / cache.k.shape[0] == as_held / 4 + 2 * 2


def test_latents_are_refused(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="kv_dtype fp8 was asked for and deepseek_v3 models keep"):
        start(checkpoint(tiny, "deepseek_v3"), **FP8)


def test_another_value_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="kv_dtype is 'int8'; give one of as-dtype, fp8"):
        start(checkpoint(tiny), kv_dtype="int8")
