"""The engine with a library for the attention of long prompts; here PyTorch's kernel for CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_runs import assert_head_is_alive, ids_of
from support.tiny_fixture import Tiny
from torch import Tensor

pytest.importorskip("triton")

from headstart.backends.cuda import backend as cuda_backend
from headstart.backends.cuda import device_rounds, libraries
from headstart.backends.cuda.backend import CudaBackend
from headstart.backends.cuda.libraries import Library, by_cudnn
from headstart.backends.rows import HeadRows, TrunkRows
from headstart.engine.engine import Engine
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
    monkeypatch.setattr(device_rounds, "MOST_GROUPS", 0)  # all rows are too many for a round
    library = Library("spied", attend, 6, 6)
    monkeypatch.setattr(cuda_backend, "choose_library", lambda *_: library)
    fused = Engine(model(tiny), kernels="on", **settings)
    off = Engine(model(tiny), kernels="off", **settings)
    found, wanted = ([*e.generate(prompts[:2], params), *e.generate(prompts[2:], params)]
                     for e in (fused, off))  # fmt: skip
    assert ids_of(found) == ids_of(wanted)
    assert_head_is_alive(found)
    assert {(16, 16), (14, 30), (7, 23)} <= set(asked), "first, later, behind a prefix"
    assert "long prompts attend by spied" in fused.notes
    exact = Engine(model(tiny), kernels="on", exact=True, **settings)
    assert not any("attend by" in note for note in exact.notes), "libraries go by numbers of rows"


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
    rows = [read(prompt[:20], 0, feeds_head=False), read(prompt[:8], 5, 0, feeds_head=False)]
    (states, _), logits = fused.backend.trunk_pass(rows)
    (all_states, _), wanted = off.backend.trunk_pass(rows)
    assert len(states) == 0 and len(all_states) == 20
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_what_a_head_will_not_read_does_not_leave_the_last_layer_either(tiny: Tiny) -> None:
    """Beside a request that feeds no head: all states of the others, and all logits."""
    prompt = [(5 * i) % 61 + 2 for i in range(20)]
    sizes = {"dtype": "float32", "block_size": 4, "kv_bytes": 1 << 17}
    fused, off = (Engine(model(tiny), kernels=kernels, **sizes) for kernels in ("on", "off"))
    rows = [read(prompt, 0, feeds_head=False), read(prompt[3:13], 5, 0), read(prompt[7:15], 9)]
    found, logits = fused.backend.trunk_pass(rows)
    states, wanted = off.backend.trunk_pass(rows)
    assert [len(own) for own in found] == [0, 10, 8], "the second one has more to read"
    assert len(logits) == 2
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1:], states[1:], rtol=1e-4, atol=1e-4)


def read(
    tokens: list[int], first_block: int, num_logits: int = 1, *, feeds_head: bool = True
) -> TrunkRows:
    """A prompt, or where it has no logits a part of one."""
    return TrunkRows(tokens, 0, range(first_block, first_block + 5), num_logits, feeds_head)


def test_a_head_that_only_reads_leaves_the_same_keys_and_values(tiny: Tiny) -> None:
    engine = Engine(model(tiny), dtype="float32", block_size=4, kv_bytes=1 << 17, kernels="on")
    prompt, backend = [(5 * i) % 61 + 2 for i in range(20)], engine.backend
    assert isinstance(backend, CudaBackend)
    (states,), _ = backend.trunk_pass([read(prompt, 0)])
    rows = [HeadRows(prompt[1:], 1, range(5), states[:-1])]
    (cache,) = backend.memory.head
    found = []
    for run in (backend.head_pass, backend.fill_head):
        cache.k.zero_(), cache.v.zero_()
        run(0, rows)
        found.append((cache.k.clone(), cache.v.clone()))
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*found, strict=True))
