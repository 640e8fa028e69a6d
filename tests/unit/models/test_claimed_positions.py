"""A config that claims millions of positions takes no memory for them unless they are asked for."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from support.head_edits import edited
from support.tiny_fixture import Tiny

from headstart.checkpoint.reader import Checkpoint
from headstart.models import build as building
from headstart.models import rope
from headstart.models.build import build
from headstart.models.rope import RopeConfig, RotaryTable

CLAIMED = 200_000


@pytest.fixture
def claiming(tiny: Tiny, tmp_path: Path) -> Checkpoint:
    claim = partial(dict.update, max_position_embeddings=CLAIMED)
    folder = edited(tiny("mimo", dtype="F32"), tmp_path / "model", change_config=claim)
    return Checkpoint.open(folder)


def test_tables_are_bounded_where_no_length_was_asked_for(
    claiming: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "_TABLE_BYTES", 1 << 20)
    model = build(claiming, device="cpu", dtype="float32")
    tables = (model.trunk.rotary.cos, model.trunk.rotary.sin)
    assert sum(table.nbytes for table in tables) <= 1 << 20
    assert model.trunk.rotary.num_positions == model.max_len < CLAIMED
    said = f"{model.max_len} of the model's {CLAIMED} positions"
    assert any(said in note and "--max-model-len" in note for note in model.notes)


def test_a_length_that_was_asked_for_is_given(
    claiming: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "_TABLE_BYTES", 1 << 20)
    model = build(claiming, device="cpu", dtype="float32", max_model_len=50_000)
    assert model.trunk.rotary.num_positions == model.max_len == 50_000
    assert not any("positions" in note for note in model.notes)


def test_ten_million_positions_are_bounded_by_default() -> None:
    """By the real limit, without a table: it would still take a gigabyte."""
    notes: list[str] = []
    claimed = partial(RopeConfig, "default", 1e4)
    for dim, dtype, expected in ((128, torch.float32, 1 << 20), (64, torch.bfloat16, 1 << 22)):
        config = _Claim(claimed(dim))
        assert building._own_length(config, dtype, notes) == expected
    own = _Claim(claimed(128), head=RopeConfig("default", 1e6, 128))
    assert building._own_length(own, torch.float32, notes) == 1 << 19
    assert len(notes) == 3


class _Claim:
    max_positions, sliding, compressed = 10_000_000, None, None

    def __init__(self, rope: RopeConfig, head: RopeConfig | None = None) -> None:
        self.rope, self.rope_of_head = rope, head or rope


@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_table_made_in_parts_is_the_same(
    dtype: torch.dtype, is_interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RopeConfig("default", 1e4, 32, attention_factor=1.25, is_interleaved=is_interleaved)
    whole = RotaryTable(config, 1000, dtype)
    monkeypatch.setattr(rope, "_ROWS", 64)
    parts = RotaryTable(config, 1000, dtype)
    assert torch.equal(whole.cos, parts.cos) and torch.equal(whole.sin, parts.sin)
    assert whole.cos.dtype == dtype
