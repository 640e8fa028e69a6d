"""What requests in rounds take of recurrent layers: planned, made for the drafts that are let
through, and filled as in serving when rounds are timed. Interpreted here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engine_runs import ids_of
from support.tiny_fixture import Tiny

pytest.importorskip("triton")

from headstart.backends.base import CacheSizes
from headstart.backends.cuda.backend import CudaBackend
from headstart.backends.cuda.device_rounds import CapturedRounds
from headstart.backends.cuda.recurrent import RecurrentBatch
from headstart.backends.cuda.round_profile import BlankRounds
from headstart.backends.cuda.shapes import RoundShape
from headstart.engine import core
from headstart.engine.auto.costs import NEVER_PAYS
from headstart.engine.engine import Engine
from headstart.engine.memory import Memory, MemoryNeeds, plan_memory, round_sizes
from headstart.engine.options import EngineOptions, Speculate
from headstart.errors import EngineError
from headstart.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_kernels")

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64,
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16,
    "linear_value_head_dim": 12, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
}  # fmt: skip
GIVEN = 1 << 20


@pytest.fixture
def folder(tiny: Tiny) -> Path:
    return tiny("qwen3_5_text", rate=0.9, seed=0, dtype="F32", **SIZES)


def start(folder: Path, kernels: str = "on", **settings: Any) -> Engine:
    settings = {"speculate": 2, "max_running_requests": 2, "kv_bytes": GIVEN, **settings}
    return Engine(folder, dtype="float32", block_size=4, kernels=kernels, **settings)


def rounds_of(engine: Engine) -> tuple[CapturedRounds, RecurrentBatch]:
    assert engine.loop.rounds is not None
    device = engine.loop.rounds._device
    assert isinstance(device, CapturedRounds) and device.batch.recurrent is not None
    return device, device.batch.recurrent


@pytest.mark.parametrize(("speculate", "drafts"), [(0, 0), (2, 2), (16, 16), ("auto", 16)])
def test_rings_take_what_was_planned_for_them(
    folder: Path, speculate: Speculate, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "profile_host_rounds", lambda *_, **__: (NEVER_PAYS, None))
    engine = start(folder, speculate=speculate, max_running_requests=3)
    device, recurrent = rounds_of(engine)
    needs, cache, rings = engine.memory.needs, engine.memory.cache, recurrent.rings[0]
    assert device.batch.max_drafts == drafts
    assert rings.inputs.shape[:2] == (3, max(2 * (drafts + 1), drafts + 1 + 3))
    assert 3 * needs.round_bytes == recurrent.num_bytes > rings.inputs.nbytes > 0
    assert isinstance(engine.backend, CudaBackend)
    states = sum(s.conv.nbytes + s.memory.nbytes for s in engine.backend.memory.states)
    assert states == cache.num_states * needs.state_bytes
    blocks = cache.num_blocks * needs.block_bytes
    assert recurrent.num_bytes + states + blocks <= GIVEN
    assert any("for the newest rows of each request in" in note for note in engine.notes)


def test_only_kernels_have_rings_and_they_leave_less_to_the_others(folder: Path) -> None:
    without, with_rounds = start(folder, "off").backend, start(folder).backend
    options = EngineOptions(kv_bytes=GIVEN, speculate=4, block_size=4, max_running_requests=8)

    def planned(fused: bool, options: EngineOptions) -> Memory:
        return plan_memory(MemoryNeeds.of(with_rounds if fused else without, options), options)

    plain, fused = planned(False, options), planned(True, options)
    rings = with_rounds.round_bytes(round_sizes(with_rounds, options))
    assert plain.needs.round_bytes == 0 < fused.needs.round_bytes == rings
    assert (plain.cache.num_states, fused.cache.num_states) == (8 * (2 + 4), 8 * 2 + 2 * 4)
    few = EngineOptions(kv_bytes=8 * rings, speculate=4, max_running_requests=8)
    with pytest.raises(
        EngineError, match=r"the newest rows of 8 requests need [\d,]+ bytes .* speculate"
    ):
        planned(True, few)
    assert planned(False, few).cache.num_blocks > 0, "without kernels there is room"


def test_a_request_for_more_drafts_than_rings_hold_gets_so_many(folder: Path) -> None:
    prompts = [[3, 4, 5, 6, 7], [5, 20]]
    params = [
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, speculate=drafts)
        for drafts in (1, 4)
    ]
    wanted = start(folder, "off", max_running_requests=4).generate(prompts, params)
    engine = start(folder, max_running_requests=4)
    assert engine.loop.rounds is not None
    names = [engine.add(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    seen = set[int | str | None]()
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
        seen |= {request.params.speculate for request in engine.loop.rounds.requests}
    found = [engine.collect(name) for name in names]
    assert ids_of(found) == ids_of(wanted) and seen == {1, 4}
    assert [len(result.stats.acceptance.drafted) for result in found] == [1, 2]
    assert found[0].stats.acceptance == wanted[0].stats.acceptance
    assert engine.stats.slow_rounds == {}


def test_blank_requests_have_memories_of_their_own(folder: Path) -> None:
    device, recurrent = rounds_of(start(folder, max_running_requests=4))
    blank = BlankRounds(device, CacheSizes(32, 4, 8))
    assert not recurrent.slots.any(), "as they were: one memory for all"
    recurrent.replays.fill_(3)  # left by a round
    blank._fill(RoundShape(4, 2, 3), 9)
    assert recurrent.slots.tolist() == [0, 1, 2, 3] and recurrent.replays.tolist() == [1] * 4
    blank._fill(RoundShape(2, 2, 3), 1)
    assert recurrent.replays.tolist() == [0, 0, 1, 1], "nothing lies before a first row"
    blank = BlankRounds(device, CacheSizes(32, 4, 3))
    blank._fill(RoundShape(4, 0, 0), 9)
    assert recurrent.slots.tolist() == [0, 1, 2, 0]
    blank._fill(RoundShape(4, 0, 0), 0)
    assert not recurrent.replays.any() and not device.batch.lengths.any()
