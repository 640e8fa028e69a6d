"""Collecting what vLLM serves, without vLLM: slots, requests, files, and the worker's steps."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headstart.errors import ConfigError, DataError
from headstart.vllm_plugin import collected
from headstart.vllm_plugin.collect import Collector, collector_of, joined, state_kind
from headstart.vllm_plugin.collected import Collected, Writing, files, read, write
from headstart.vllm_plugin.followed import Requests
from headstart.vllm_plugin.state_table import StateTable, open_table, table_of

BLOCK, WIDTH, LAYER = 4, 3, "model.layers.2.self_attn.attn"
Pass = Callable[[list[int], list[int], list[int]], None]


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """What vLLM's forward context says during a pass: slots by layer."""
    found: dict[str, Tensor] = {}
    module: Any = ModuleType("vllm.forward_context")
    module.get_forward_context = lambda: SimpleNamespace(slot_mapping=found)
    module.is_forward_context_available = lambda: True
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.forward_context", module)
    return found


def table(num_slots: int = 16) -> StateTable:
    made = StateTable(frozenset({LAYER}))
    made.open(num_slots)
    return made


def state(position: int, token: int) -> list[float]:
    return [float(position), float(token), 1.0]


def passing(kept: StateTable, slots: dict[str, Tensor]) -> Pass:
    def run(at: list[int], positions: list[int], tokens: list[int]) -> None:
        slots.update({"model.layers.0.self_attn.attn": torch.zeros(len(at)), LAYER: _int64(at)})
        states = torch.tensor([state(*pair) for pair in zip(positions, tokens, strict=True)])
        kept.record(_int64(tokens).int(), _int64(positions), states)

    return run


def _int64(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_a_slot_holds_what_the_last_pass_gave_it(slots: dict[str, Tensor]) -> None:
    kept = table()
    run = passing(kept, slots)
    run([8, 9, 10], [0, 1, 2], [5, 6, 7])
    run([10, 11, -1], [2, 3, 99], [70, 8, 99])  # the last row is padding
    states, following, positions = kept.rows(_int64([8, 9, 10, 11]))
    assert following.tolist() == [5, 6, 70, 8]
    assert positions.tolist() == [0, 1, 2, 3]
    assert states[2].tolist() == state(2, 70)
    assert 99 not in kept.next_ids[:16].tolist()


def test_passes_without_a_kv_cache_are_passed_over(slots: dict[str, Tensor]) -> None:
    kept = StateTable(frozenset({LAYER}))
    passing(kept, slots)([0], [0], [1])  # profiling: the cache's size is not known yet
    assert not len(kept.states)
    kept.open(16)
    slots.clear()
    kept.record(torch.ones(1), torch.ones(1), torch.full((1, WIDTH), 9.0))
    assert not kept.states.any()


def test_rows_are_there_before_a_pass_can_be_captured(slots: dict[str, Tensor]) -> None:
    kept = StateTable(frozenset({LAYER}))
    kept.record(torch.ones(1), torch.ones(1), torch.ones(1, WIDTH))
    kept.open(16)
    made = kept.states
    assert made.shape == (17, WIDTH)
    passing(kept, slots)([0], [0], [1])
    assert kept.states is made


def test_positions_of_three_axes_are_those_of_text(slots: dict[str, Tensor]) -> None:
    kept = table()
    slots[LAYER] = _int64([1])
    kept.record(torch.ones(1), torch.full((3, 1), 7), torch.ones(1, WIDTH))
    assert kept.rows(_int64([1]))[2].tolist() == [7]


def test_the_group_of_the_drafts_layer_is_found() -> None:
    draft: Any = nn.Module()
    draft.inner = nn.Linear(1, 1)
    draft.inner.layer_name = LAYER
    draft.headstart_table = table_of(draft)
    spec = SimpleNamespace(block_size=BLOCK)
    groups = [
        SimpleNamespace(layer_names=["model.layers.0.self_attn.attn"], kv_cache_spec=spec),
        SimpleNamespace(layer_names=[LAYER], kv_cache_spec=spec),
    ]
    config = SimpleNamespace(kv_cache_groups=groups, num_blocks=3)
    assert open_table(draft, config) == (1, BLOCK)
    with pytest.raises(ConfigError, match="keeps no KV cache for model"):
        open_table(draft, SimpleNamespace(kv_cache_groups=groups[:1], num_blocks=3))
    with pytest.raises(ConfigError, match="no attention layer"):
        table_of(nn.Linear(1, 1))


def step(
    *,
    new: dict[str, tuple[list[int] | None, list[int]]] | None = None,
    cached: dict[str, tuple[list[int] | None, int]] | None = None,
    resumed: set[str] | None = None,
    finished: set[str] | None = None,
) -> Any:
    """A `SchedulerOutput`; blocks are of the second of two groups."""
    goes_on = cached or {}
    return SimpleNamespace(
        finished_req_ids=finished or set(),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, prompt_token_ids=prompt, block_ids=([0], blocks),
                            mm_features=[], lora_request=None)
            for name, (prompt, blocks) in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(goes_on),
            new_block_ids=[None if b is None else ([0], b) for b, _ in goes_on.values()],
            num_computed_tokens=[count for _, count in goes_on.values()],
            resumed_req_ids=resumed or set(),
        ),
    )  # fmt: skip


def test_requests_are_followed_through_new_blocks_and_interruptions() -> None:
    requests = Requests(group=1)
    requests.follow(step(new={"a": ([1, 2, 3], [5]), "b": ([4], [6]), "no text": (None, [7])}))
    requests.follow(step(cached={"a": ([8], 4), "b": (None, 2), "unknown": ([9], 1)}))
    requests.follow(step(cached={"b": ([2, 3], 5)}, resumed={"b"}))
    done = step(finished={"a", "b", "unknown", "no text"})
    found = {tuple(one.prompt): one for one in requests.finished(done)}
    assert found[1, 2, 3].slots(6, BLOCK) == [20, 21, 22, 23, 32, 33]
    assert found[4,].blocks == [2, 3]
    assert found[4,].num_computed == 5
    assert list(requests.finished(done)) == []


def test_an_answer_is_kept_up_to_its_last_rounds(tmp_path: Path, slots: dict[str, Tensor]) -> None:
    kept, out = table(64), Writing(tmp_path, 10**9)
    run = passing(kept, slots)
    collector = Collector(kept, 1, BLOCK, 1, out, "after_final_norm")
    text = list(range(10, 34))  # three of the prompt
    blocks = [3, 1, 7, 5, 2, 9]
    collector.step(step(new={"a": (text[:3], blocks), "short": (text[:3], [10])}))
    at = [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(len(text) - 1)]
    run(at, list(range(23)), text[1:])
    collector.step(step(cached={"a": (None, 22), "short": (None, 4)}))
    collector.step(step(finished={"a", "short"}))
    out.wait()
    [path] = files(tmp_path)
    found = read(path)
    assert found.ids.tolist() == text[:18]  # two rounds of two tokens are left out
    assert found.num_prompt == 3
    assert found.kind == "after_final_norm"
    assert found.states.tolist() == [state(p, text[p + 1]) for p in range(18)]
    assert (out.num_written, out.num_left_out) == (1, 0)


def test_slots_that_hold_another_text_are_left_out() -> None:
    states, following = torch.ones(4, WIDTH), torch.tensor([2, 3, 4, 5], dtype=torch.int32)
    positions = torch.arange(4, dtype=torch.int32)
    assert joined([1, 2], states, following, positions) is not None
    assert joined([1, 9], states, following, positions) is None
    assert joined([1, 2], states, following, positions.flip(0)) is None


def test_writing_stops_at_its_limit(tmp_path: Path) -> None:
    out = Writing(tmp_path, 1)
    one = Collected(torch.ones(3, dtype=torch.int32), torch.ones(3, WIDTH), 1)
    for made in (lambda: one, lambda: one, lambda: None):
        out.add(made, 0)
    out.wait()
    assert (out.num_written, out.num_left_out) == (1, 2)
    assert len(list(tmp_path.iterdir())) == 1


def test_files_of_earlier_runs_count_and_the_folder_is_its_owners(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    one = Collected(torch.ones(3, dtype=torch.int32), torch.ones(3, WIDTH), 1)
    assert Writing(folder, 1).has_room(1)
    assert folder.stat().st_mode & 0o777 == 0o700
    num_bytes = write(folder, "earlier", one)
    assert not Writing(folder, num_bytes).has_room(1)
    assert Writing(folder, num_bytes + 1).has_room(1)


def test_answers_that_wait_to_be_written_take_so_much_memory_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collected, "_MOST_HELD", 100)
    out, is_written = Writing(tmp_path, 10**9), threading.Event()

    def slow() -> Collected | None:
        is_written.wait(60)
        return None

    out.add(slow, 60)
    assert out.has_room(40)
    assert not out.has_room(41)
    is_written.set()
    out.wait()
    assert out.has_room(100)


def test_rows_are_not_copied_where_there_is_no_room(
    tmp_path: Path, slots: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, out = table(64), Writing(tmp_path, 10**9)
    collector = Collector(kept, 1, BLOCK, 1, out)
    collector.step(step(new={"a": ([1, 2], [0, 1, 2, 3, 4])}))
    passing(kept, slots)([0], [0], [2])
    collector.step(step(cached={"a": (None, 20)}))
    monkeypatch.setattr(collected, "_MOST_HELD", 16 * (4 * WIDTH + 4 + 4) - 1)
    monkeypatch.setattr(StateTable, "rows", lambda self, at: pytest.fail("copied"))
    collector.step(step(finished={"a"}))
    assert (out.num_written, out.num_left_out) == (0, 1)


def test_plain_trunks_give_states_behind_their_last_norm() -> None:
    def kind(model_type: str) -> str | None:
        text = SimpleNamespace(model_type=model_type)
        return state_kind(SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text)))

    assert {kind(name) for name in ("llama", "qwen2", "mistral")} == {"after_final_norm"}
    assert {kind(name) for name in ("mimo", "qwen3", "qwen3_moe", "glm4_moe")} == {None}


def test_states_can_be_left_in_their_file(tmp_path: Path) -> None:
    write(tmp_path, "a", Collected(torch.ones(3, dtype=torch.int32), torch.ones(3, WIDTH), 1))
    found = read(tmp_path / "a.safetensors", with_states=False)
    assert found.states.is_meta and found.states.shape == (3, WIDTH)
    assert (found.ids.tolist(), found.num_prompt) == ([1, 1, 1], 1)


def test_files_that_are_none_of_ours_are_named(tmp_path: Path) -> None:
    write(tmp_path, "odd", Collected(torch.ones(3, dtype=torch.int32), torch.ones(2, WIDTH), 1))
    with pytest.raises(DataError, match="expected a state for each id"):
        read(tmp_path / "odd.safetensors")
    (tmp_path / "text.safetensors").write_text("no")
    with pytest.raises(DataError, match="is no collected answer"):
        read(tmp_path / "text.safetensors")
    with pytest.raises(DataError, match="expected one that vLLM collected"):
        files(tmp_path / "none")


def worker(tmp_path: Path, *, rank: int = 0, draft: Any = None, **asked: Any) -> Any:
    speculative = SimpleNamespace(
        draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(), model="m"),
        num_speculative_tokens=3,
    )
    model = SimpleNamespace(hf_text_config=SimpleNamespace(model_type="mimo"))
    config = SimpleNamespace(
        speculative_config=speculative, additional_config={"headstart": asked}, model_config=model
    )
    runner = SimpleNamespace(get_draft_model=lambda: draft)
    return SimpleNamespace(vllm_config=config, model_runner=runner, rank=rank)


def test_a_worker_collects_only_where_it_was_asked_and_can(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder was named"):
        collector_of(worker(tmp_path), None)
    asked = {"collect": str(tmp_path / "out")}
    with pytest.raises(ConfigError, match="which the plugin does not know"):
        collector_of(worker(tmp_path, draft=nn.Linear(1, 1), **asked), None)
    draft: Any = nn.Module()
    draft.headstart_table = StateTable(frozenset({LAYER}))
    spec = SimpleNamespace(block_size=BLOCK)
    groups = [SimpleNamespace(layer_names=[LAYER], kv_cache_spec=spec)]
    config = SimpleNamespace(kv_cache_groups=groups, num_blocks=3)
    assert collector_of(worker(tmp_path, draft=draft, rank=1, **asked), config) is None
    assert collector_of(worker(tmp_path, draft=draft, **asked), config) is not None
