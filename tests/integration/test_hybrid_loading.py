"""Hybrid checkpoints as they are published: nested configs, other prefixes, tied, with a vision
part; what is not computed is refused by name, and states are accounted for in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_runs import checkpoint, greedy, ids_of, make_prompts, run, start
from support.head_edits import Tensors, edited
from support.tiny_fixture import Tiny

from headstart.backends import base
from headstart.backends.base import CacheSizes
from headstart.backends.options import BackendOptions
from headstart.backends.torch.backend import TorchBackend
from headstart.checkpoint.reader import Checkpoint
from headstart.engine.memory import MemoryNeeds, plan_memory
from headstart.engine.options import EngineOptions
from headstart.errors import EngineError, RequestError
from headstart.models.build import build

PROMPTS = make_prompts()[:4]
FRONT = "model.language_model."
GIB = 1 << 30


def answers(folder: Path, **settings: Any) -> list[list[int]]:
    options = {"speculate": 2, "kv_bytes": 2_000_000, **settings}
    return ids_of(run(start(folder, **options), PROMPTS, greedy(10)))


def moved(own: Tensors, prefix: str) -> None:
    for name in [name for name in own if name.startswith(FRONT)]:
        own[prefix + name.removeprefix(FRONT)] = own.pop(name)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.", ""])
def test_a_trunk_is_found_below_every_published_prefix(
    prefix: str, tiny: Tiny, tmp_path: Path
) -> None:
    folder = checkpoint(tiny, "qwen3_5")
    other = edited(folder, tmp_path / "moved", change=lambda own: moved(own, prefix))
    assert answers(other) == answers(folder)


def test_the_vision_part_is_left_out_with_a_note(tiny: Tiny, tmp_path: Path) -> None:
    folder = checkpoint(tiny, "qwen3_5")

    def add(own: Tensors) -> None:
        own["model.visual.patch_embed.proj.weight"] = torch.ones(3, 4)
        own["model.visual.merger.norm.weight"] = torch.ones(5)

    whole = edited(folder, tmp_path / "seeing", change=add)
    engine = start(whole, speculate=2, kv_bytes=2_000_000)
    assert "text only: 2 tensors of the vision part are not loaded" in engine.notes
    assert ids_of(run(engine, PROMPTS, greedy(10))) == answers(folder)


def test_a_picture_in_a_message_is_refused(tiny: Tiny) -> None:
    engine = start(checkpoint(tiny, "qwen3_5"), kv_bytes=2_000_000)
    engine.prompts.tokenizer.chat_template = "{{ messages[0].content }}"
    parts = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {}}]
    with pytest.raises(RequestError, match="parts of type image_url; this engine reads text only"):
        engine.read([{"role": "user", "content": parts}])


def test_a_tied_model_may_say_so_at_the_top_level_only(tiny: Tiny) -> None:
    folder = checkpoint(tiny, "qwen3_5")
    for is_stored in (True, False):
        opened = Checkpoint.open(folder)
        opened.config.raw["tie_word_embeddings"] = True
        if not is_stored:
            del opened.tensors["lm_head.weight"]
        model = build(opened, device="cpu", with_head=False)
        assert model.config.is_tied is not is_stored


@pytest.mark.parametrize(
    "settings",
    [{"weights": "int8", "dtype": "float32"}, {"dtype": "bfloat16"}, {"speculate": "auto"}],
    ids=str,
)
def test_other_formats_and_choices_run(settings: dict[str, Any], tiny: Tiny) -> None:
    found = answers(checkpoint(tiny, "qwen3_next"), **settings)
    assert [len(ids) for ids in found] == [10] * 4


def test_states_are_part_of_the_memory_that_is_given(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(Checkpoint.open(checkpoint(tiny, "qwen3_next")), device="cpu")
    backend = TorchBackend(model, BackendOptions(threads=1))
    state, block = backend.state_bytes(), backend.block_bytes(16)
    assert model.config.delta is not None
    assert state == 4 * (3 * model.config.delta.channels + 4 * 16 * 12)
    assert block == 4 * (2 * 16 * 2 * 2 * 16 + 128)  # one layer of the trunk and the head's attend

    def planned(**settings: Any) -> CacheSizes:
        options = EngineOptions(**settings)
        return plan_memory(MemoryNeeds.of(backend, options), options).cache

    plan = planned(kv_bytes=20 * state, speculate=3)
    assert plan.num_states == 10
    assert plan.num_states * state + plan.num_blocks * block <= 20 * state
    with pytest.raises(EngineError, match=f"the state of one request needs {state:,} bytes"):
        planned(kv_bytes=state)

    monkeypatch.setattr(base, "available_bytes", lambda: 64 * GIB)
    usual = planned(speculate=3, max_running_requests=4)
    assert usual.num_states == 4 * (1 + 3 + 1)
    assert planned(speculate=3).num_states * state <= GIB
