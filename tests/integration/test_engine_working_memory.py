"""What a GPU is expected to be asked for beside weights, K/V and states, against what is taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

pytest.importorskip("triton")

from headstart.backends.base import Backend, DeviceBytes, RoundSizes, WorkingBytes, WorkSizes
from headstart.backends.cuda.backend import CudaBackend
from headstart.backends.cuda.decode_batch import WINDOW, DecodeBatch
from headstart.backends.cuda.device_rounds import CapturedRounds
from headstart.backends.cuda.int8 import Int8Rows, int8_bytes
from headstart.backends.options import BackendOptions
from headstart.backends.torch.backend import TorchBackend
from headstart.backends.working_memory import RESERVE, activation_bytes, context_bytes
from headstart.checkpoint.reader import Checkpoint
from headstart.engine.engine import Engine
from headstart.engine.memory import MemoryNeeds, plan_memory, resolved_requests, round_sizes
from headstart.engine.options import EngineOptions
from headstart.models.build import build

# Tensors of passes that prompts join: ids, positions and sources, slots, states, what attention
# gives; of each group its start, rows, `seen` and table; and places of a request's rows.
ROW = 3 * 8 + 4 + (2 * 64 + 2 * 16) * 4
JOINED = (64 + 2048 + 64) * ROW + 64 * 4 * (3 + 9) + 17 * 8
WORK = WorkSizes(
    rounds=RoundSizes(max_requests=8, max_drafts=16, num_drafts=3, max_tokens=100), block_size=16,
    max_rows=1000,
)  # fmt: skip


def model(tiny: Tiny) -> Path:
    sizes = {
        "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 640,
    }  # fmt: skip
    return tiny("mimo", rate=0.9, seed=1, dtype="F32", **sizes)


def on_gpu(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, kind: type[Backend] = CudaBackend, **options: Any
) -> Backend:
    """A backend that believes to be on a GPU; nothing is computed."""
    loaded = build(Checkpoint.open(model(tiny)), device="cpu", dtype="float32")
    backend = kind(loaded, BackendOptions(threads=1, **options))
    monkeypatch.setattr(backend, "device", torch.device("cuda"))
    return backend


@pytest.mark.parametrize("speculate", unless_long([0, 2], [0, 2, "auto"]))
def test_a_batch_takes_what_was_computed_for_it(tiny: Tiny, speculate: int | str) -> None:
    engine = Engine(
        model(tiny), dtype="float32", block_size=4, kv_bytes=1 << 17, kernels="on",
        speculate=speculate, max_running_requests=5,
    )  # fmt: skip
    assert engine.loop.rounds is not None
    device, backend = engine.loop.rounds._device, engine.backend
    assert isinstance(device, CapturedRounds)
    sizes = round_sizes(backend, engine.options, max_tokens=device.sizes.max_tokens)
    settings: dict[str, Any] = {
        "window": WINDOW, "block_size": 4, "dtype": backend.dtype, "device": torch.device("meta"),
    }  # fmt: skip
    computed = DecodeBatch.for_rounds(sizes, backend.config, **settings)
    one = DecodeBatch.for_rounds(replace(sizes, max_requests=1), backend.config, **settings)
    storages = [value.untyped_storage() for value in tensors_of(device.batch)]
    taken = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert computed.num_bytes == 5 * one.num_bytes == sum(taken.values()) > 5 * 8 * 640


def tensors_of(batch: DecodeBatch) -> list[torch.Tensor]:
    own = [*vars(batch).values(), *vars(batch.settings).values()]
    return [value for value in own if isinstance(value, torch.Tensor)]


def test_int8_copies_take_what_was_computed_for_them(tiny: Tiny) -> None:
    engine = Engine(
        model(tiny), dtype="float32", block_size=4, kv_bytes=1 << 17, kernels="on",
        draft_weights="int8",
    )  # fmt: skip
    head = engine.backend.head
    assert head is not None
    copies = [layer for layer in head.modules() if isinstance(layer, Int8Rows)]
    assert len(copies) > 3
    taken = sum(copy.weight.nbytes + copy.scales.nbytes for copy in copies)
    assert int8_bytes(head) == taken


def test_everything_is_counted_on_a_gpu(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = on_gpu(tiny, monkeypatch, draft_weights="int8")
    assert backend.head is not None
    working, logits = backend.working_bytes(WORK), 4 * 640 * 4  # of one request
    activations = 1000 * (2 * 2 * 96 + 6 * 64) * 4
    copies = int8_bytes(backend.head) + 640 * (64 + 4)
    context = 2 * backend.model.max_len * 2 * 16 * 4  # K and V of one head, twice
    joined = JOINED + activation_bytes(backend.model, 64 * 32)  # prompts, in graphs
    assert working.fixed == RESERVE + activations + copies + context + joined
    assert working.per_request > (6 + 2 * 3) * logits + 8 * 640, "passes, rounds, settings"
    more = backend.working_bytes(replace(WORK, vocab_tokens=100))
    assert more.fixed - working.fixed == 100 * (64 * 4 + 64 + 4), "rows of the LM head, in int8 too"


def test_what_is_not_there_is_not_counted(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = on_gpu(tiny, monkeypatch).working_bytes(WORK)
    exact = on_gpu(tiny, monkeypatch, exact=True)
    context, joined = (
        context_bytes(exact.model, 1 << 16),
        JOINED + activation_bytes(exact.model, 64 * 32),
    )
    assert usual.fixed - exact.working_bytes(WORK).fixed == context + joined
    plain = on_gpu(tiny, monkeypatch, TorchBackend)
    fixed = usual.fixed - joined
    assert plain.working_bytes(WORK) == WorkingBytes(fixed, 6 * 4 * 640 * 4), "no rounds"
    monkeypatch.undo()
    assert plain.working_bytes(WORK) == exact.working_bytes(WORK) == WorkingBytes()


def test_prompts_that_are_not_cut_have_more_rows(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = on_gpu(tiny, monkeypatch)
    monkeypatch.setattr(backend, "device_bytes", lambda: DeviceBytes(1 << 34, 1 << 34))
    whole, cut = (
        MemoryNeeds.of(
            backend, EngineOptions(chunked_prefill=not is_whole, max_batched_tokens=16)
        ).working.fixed
        for is_whole in (True, False)
    )
    rows = activation_bytes(backend.model, backend.model.max_len - 16)
    assert whole - cut == rows > 0


def test_all_that_is_planned_fits_into_the_share_of_a_gpu(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = on_gpu(tiny, monkeypatch)
    device = DeviceBytes(3 << 29, 1 << 31)
    monkeypatch.setattr(backend, "device_bytes", lambda: device)
    options = EngineOptions(memory_fraction=0.8).resolved("cuda")
    needs = MemoryNeeds.of(backend, options)
    options = resolved_requests(needs, options)
    cache = plan_memory(needs, options).cache
    taken = cache.num_blocks * needs.block_bytes + needs.working.of(options.num_requests)
    assert 1 < options.num_requests < 256
    assert device.total - device.free + taken <= 0.8 * device.total
