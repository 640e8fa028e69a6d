"""The engine with a library for the attention of long prompts; here PyTorch's kernel for CPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import assert_head_is_alive, ids_of
from tiny_fixture import Tiny
from torch import Tensor

pytest.importorskip("triton")

from headstart.assembly.build import build
from headstart.checkpoint.reader import Checkpoint
from headstart.engine import device_runner, memory
from headstart.engine.engine import Engine
from headstart.engine.exact_runner import ExactRunner
from headstart.engine.options import EngineOptions
from headstart.gpu import cudnn
from headstart.gpu.cudnn import by_cudnn
from headstart.gpu.libraries import Library
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

    monkeypatch.setattr(cudnn, "STEP", 8)
    library = Library("spied", attend, 6, 6)
    monkeypatch.setattr(device_runner, "choose_library", lambda *_: library)
    fused = Engine(model(tiny), kernels="on", **settings)
    off = Engine(model(tiny), kernels="off", **settings)
    found, wanted = ([*e.generate(prompts[:2], params), *e.generate(prompts[2:], params)]
                     for e in (fused, off))  # fmt: skip
    assert ids_of(found) == ids_of(wanted)
    assert_head_is_alive(found)
    assert {(16, 16), (14, 30), (7, 23)} <= set(asked), "first, later, behind a prefix"
    assert "long prompts attend by spied" in fused.notes and not ExactRunner.uses_library


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
