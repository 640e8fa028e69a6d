"""How much K/V memory is taken where no option says how much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engine_runs import checkpoint
from support.tiny_fixture import Tiny

from headstart.backends import base
from headstart.backends.options import BackendOptions
from headstart.backends.torch.backend import TorchBackend
from headstart.checkpoint.reader import Checkpoint
from headstart.engine import memory
from headstart.engine.memory import MemoryNeeds, num_blocks
from headstart.engine.options import EngineOptions
from headstart.errors import ConfigError, EngineError
from headstart.models.build import LoadedModel, build

GIB = 1 << 30
SLOT = 3 * 2 * 2 * 16 * 4  # layers of trunk and head, K and V, heads, head_dim, fp32


def built(folder: Path, **options: Any) -> LoadedModel:
    return build(Checkpoint.open(folder), device="cpu", **options)


def taken(model: LoadedModel, free: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> int:
    monkeypatch.setattr(base, "available_bytes", lambda: free)
    options = EngineOptions(**settings)
    needs = MemoryNeeds.of(plain(model), options)
    return num_blocks(needs, options) * needs.block_bytes


def plain(model: LoadedModel) -> TorchBackend:
    return TorchBackend(model, BackendOptions(threads=1))


def test_a_small_model_does_not_reserve_the_machine(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: half of all free memory was taken, gigabytes for a model of kilobytes."""
    model = built(checkpoint(tiny, max_position_embeddings=32768))
    assert taken(model, 64 * GIB, monkeypatch) <= min(64 * 2048 * (SLOT + 128 * 4 // 16), GIB)
    # One running request needs no more than one request of full length.
    assert taken(model, 64 * GIB, monkeypatch, max_running_requests=1) < 32800 * (SLOT + 32)


def test_one_request_of_full_length_always_fits(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(checkpoint(tiny, max_position_embeddings=1 << 20))
    size = plain(model).block_bytes(16)
    full = -(-((1 << 20) + 1) // 16) * size
    assert full > GIB / 2
    monkeypatch.setattr(memory, "_CPU_BYTES", GIB // 4)
    assert taken(model, 64 * GIB, monkeypatch) == full
    assert taken(model, GIB // 2, monkeypatch) <= 0.8 * GIB // 2  # unless memory is short


def test_what_the_user_says_counts(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(checkpoint(tiny, max_position_embeddings=1 << 20))
    size = plain(model).block_bytes(16)
    assert 2 * GIB - size < taken(model, 4 * GIB, monkeypatch, memory_fraction=0.5) <= 2 * GIB
    assert taken(model, 4 * GIB, monkeypatch, kv_bytes=10 * size + 1) == 10 * size
    with pytest.raises(EngineError, match=f"one K/V block needs {size:,} bytes and there are 7"):
        taken(model, 4 * GIB, monkeypatch, kv_bytes=7)


def test_a_length_beyond_the_model_s_own_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="max_model_len is 1000000; the model was made for"):
        built(checkpoint(tiny), max_model_len=10**6)
