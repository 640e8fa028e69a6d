"""The engine with a library for the attention of long prompts; here PyTorch's kernel for CPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_runs import assert_head_is_alive, ids_of
from support.tiny_fixture import Tiny
from torch import Tensor

pytest.importorskip("triton")

from headstart.engine.exact_runner import ExactRunner
from headstart.engine.head_rows import HeadRows

from headstart.backends.cuda.libraries import Library, by_cudnn
from headstart.checkpoint.reader import Checkpoint
from headstart.engine import device_runner, memory
from headstart.engine.engine import Engine
from headstart.engine.options import EngineOptions
from headstart.engine.request import Request
from headstart.engine.scheduler import Work
from headstart.models.build import build
from headstart.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_kernels")


def model(tiny: Tiny) -> Path:
    sizes = {
        "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64,
    }  # fmt: skip
    return tiny("mimo", rate=0.9, seed=1, dtype="F32", **sizes)


def test_texts_are_the_same_in_chunks_and_behind_cached_prefixes(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [(5 * i) % 61 + 2 for i in range(30)]
    prompts = [prompt, [7, 8, 9], [*prompt[:17], 4, 5, 6, 7, 8, 9]]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    settings: dict[str, Any] = {
        "dtype": "float32", "speculate": 2, "block_size": 4, "kv_bytes": 1 << 17,
        "max_batched_tokens": 16,
    }  # fmt: skip
    asked = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        asked.append((q.shape[0], k.shape[0]))
        return by_cudnn(q, k, v)

    monkeypatch.setattr(libraries, "STEP", 8)
    library = Library("spied", attend, 6, 6)
    monkeypatch.setattr(device_runner, "choose_library", lambda *_: library)
    fused = Engine(model(tiny), kernels="on", **settings)
    off = Engine(model(tiny), kernels="off", **settings)
    found, wanted = ([*e.generate(prompts[:2], params), *e.generate(prompts[2:], params)]
                     for e in (fused, off))  # fmt: skip
    assert ids_of(found) == ids_of(wanted)
    assert_head_is_alive(found)
    assert {(16, 16), (14, 30), (7, 23)} <= set(asked), "first, later, behind a prefix"
    assert "long prompts attend by spied" in fused.notes and ExactRunner.keeps_bits


def test_without_a_head_only_rows_with_logits_leave_the_last_layer(tiny: Tiny) -> None:
    prompt = [(5 * i) % 61 + 2 for i in range(20)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    fused, off = (
        Engine(
            model(tiny), dtype="float32", speculate=0, block_size=4, kv_bytes=1 << 17,
            max_batched_tokens=12, kernels=kernels,
        )
        for kernels in ("on", "off")
    )  # fmt: skip
    prompts = [prompt, prompt[3:9]]
    assert ids_of(fused.generate(prompts, params)) == ids_of(off.generate(prompts, params))
    works = [Work(blank(prompt, first), 0, count, ()) for first, count in ((0, 20), (5, 8))]
    (states, _), logits = fused.runner.trunk(works)
    (all_states, _), wanted = off.runner.trunk(works)
    assert len(states) == 0 and len(all_states) == 20
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_what_a_head_will_not_read_does_not_leave_the_last_layer_either(tiny: Tiny) -> None:
    """Beside a request without a head: all states of one, and the logits of both."""
    prompt = [(5 * i) % 61 + 2 for i in range(20)]
    sizes = {"dtype": "float32", "block_size": 4, "kv_bytes": 1 << 17}
    fused, off = (Engine(model(tiny), kernels=kernels, **sizes) for kernels in ("on", "off"))
    headless = blank(prompt, 0)
    headless.is_headless = True
    works = [Work(headless, 0, 20, ()), Work(blank(prompt[3:], 5), 0, 10, ()),
             Work(blank(prompt[7:15], 9), 0, 8, ())]  # fmt: skip
    found, logits = fused.runner.trunk(works)
    states, wanted = off.runner.trunk(works)
    assert [len(own) for own in found] == [0, 10, 8], "the second one has more to read"
    assert len(logits) == 2
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1:], states[1:], rtol=1e-4, atol=1e-4)


def blank(tokens: list[int], first_block: int) -> Request:
    blocks = list(range(first_block, first_block + 5))
    return Request("r", tokens, SamplingParams(), 0, 1, frozenset(), 0, blocks=blocks)


def test_a_head_that_only_reads_leaves_the_same_keys_and_values(tiny: Tiny) -> None:
    engine = Engine(model(tiny), dtype="float32", block_size=4, kv_bytes=1 << 17, kernels="on")
    prompt, runner = [(5 * i) % 61 + 2 for i in range(20)], engine.runner
    request = blank(prompt, 0)
    (states,), _ = runner.trunk([Work(request, 0, 20, ())])
    rows = [HeadRows(request, 1, prompt[1:], states[:-1])]
    (cache,) = runner._head_caches
    found = []
    for run in (runner.head_pass, runner.fill_head):
        cache.k.zero_(), cache.v.zero_()
        run(0, rows)
        found.append((cache.k.clone(), cache.v.clone()))
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*found, strict=True))


def test_what_a_library_copies_is_no_room_for_blocks(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(Checkpoint.open(model(tiny)), device="cpu", dtype="float32")
    monkeypatch.setattr(memory, "_free_bytes", lambda device: 1 << 24)
    on_gpu = replace(built, device=torch.device("cuda"))
    block = memory.block_bytes(built, 16)
    options = EngineOptions(memory_fraction=0.5, max_running_requests=512)
    copied = 2 * built.max_len * 2 * 16 * 4  # K and V of one head, twice
    count, _ = memory.num_blocks(on_gpu, options)
    assert count == ((1 << 24) - copied) // 2 // block
    assert memory.num_blocks(built, options)[0] == (1 << 23) // block
