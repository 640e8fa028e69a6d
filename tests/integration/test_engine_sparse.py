"""Rows that see a choice of entries: chosen in parts as at once, and nothing of it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
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
    start,
)
from support.tiny_fixture import Tiny

from headstart.engine.engine import Engine
from headstart.models import indexer, row_attention
from headstart.models.attention import Seen
from headstart.models.indexer import IndexRows
from headstart.models.mla import LatentAttention

FAMILIES = ("deepseek_v32", "glm_moe_dsa")  # an indexer in every layer; the second one follows
PROMPTS = make_prompts()[:3]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tiny: Tiny) -> Path:
    return checkpoint(tiny, request.param)


def attending(engine: Engine) -> list[LatentAttention]:
    assert engine.model.head is not None
    whole = [*engine.model.trunk.modules(), *engine.model.head.modules()]
    return [module for module in whole if isinstance(module, LatentAttention)]


def test_texts_are_the_same_where_rows_choose_in_parts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()
    inner = indexer.scores_of

    def watched(rows: IndexRows, *rest: Any) -> torch.Tensor:
        calls.append(len(rows.q))
        return inner(rows, *rest)

    monkeypatch.setattr(indexer, "scores_of", watched)
    wanted = run(start(folder, speculate=2), PROMPTS, greedy(12))
    assert_head_is_alive(wanted)
    assert max(calls) > 2
    calls.clear()
    monkeypatch.setattr(indexer, "SCORE_VALUES", 1)
    monkeypatch.setattr(row_attention, "_MASK_VALUES", 1)
    found = run(start(folder, speculate=2), PROMPTS, greedy(12))
    assert set(calls) == {1} and ids_of(found) == ids_of(wanted)


def test_nothing_that_was_chosen_outlives_a_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower sees the very choice of its leader, and then it is gone."""
    engine = start(folder, speculate=2)
    layers = attending(engine)
    made, used = list[torch.Tensor](), list[tuple[LatentAttention, torch.Tensor]]()
    choose, inner = indexer.Indexer.choose, LatentAttention._choose

    def watched(own: indexer.Indexer, rows: IndexRows, part: Seen) -> torch.Tensor | None:
        chosen = choose(own, rows, part)
        made.extend([] if chosen is None else [chosen])
        return chosen

    def seen(own: LatentAttention, index: Any, parts: list[Seen]) -> Sequence[Any]:
        result = inner(own, index, parts)
        used.extend((own, chosen) for _, chosen in result if chosen is not None)
        kept = [chosen for layer in layers for chosen in layer._chosen if chosen is not None]
        assert not kept or own._num_followers, "only for those that have not seen it yet"
        return result

    monkeypatch.setattr(indexer.Indexer, "choose", watched)
    monkeypatch.setattr(LatentAttention, "_choose", seen)
    run(engine, PROMPTS, greedy(6))
    followers = [layer for layer in layers if layer._leader]
    assert len(followers) == (engine.model.config.model_type == "glm_moe_dsa")
    assert made and len(used) == len(made) + sum(own in followers for own, _ in used)
    assert all(any(chosen is one for one in made) for _, chosen in used)
    assert {own for own, _ in used} == set(layers)
    assert not any(layer._chosen for layer in layers)
