"""`auto` where rounds run on the device by themselves; interpreted on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_runs import ids_of
from support.head_edits import edited
from support.kernel_runs import BLOCK_BYTES, SIZES
from support.tiny_fixture import Tiny

pytest.importorskip("triton")

from headstart.backends.cuda import device_rounds, round_profile
from headstart.backends.cuda.device_rounds import CapturedRounds
from headstart.backends.cuda.shapes import RoundShape
from headstart.backends.rounds import RoundTiming
from headstart.engine import core, memory
from headstart.engine.auto.costs import NEVER_PAYS, RoundCosts
from headstart.engine.auto.profile import profile_device_rounds
from headstart.engine.engine import Engine
from headstart.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_kernels")

PROMPT = [9, 10, 11]
# A draft pays where it is right more often than 15 times in 100; this head is, in a third of them.
COSTS = RoundCosts(((1, ((0, 1.0), (1, 1.15))),))


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interpreter takes decides nothing here."""
    monkeypatch.setattr(core, "profile_host_rounds", lambda *_, **__: (NEVER_PAYS, None))


def model(tiny: Tiny) -> Path:
    return tiny("mimo", rate=0.9, seed=1, dtype="F32", **SIZES)


def with_bad_head(folder: Path) -> Path:
    """The same, but the head proposes what it holds for least likely."""

    def negate(own: dict[str, torch.Tensor]) -> None:
        own["model.mtp_layers.0.final_layernorm.weight"] *= -1

    return edited(folder, folder.parent / f"{folder.name}-bad", change=negate)


def start(folder: Path, **settings: Any) -> Engine:
    settings = {"speculate": "auto", "kv_bytes": 100 * BLOCK_BYTES, **settings}
    return Engine(folder, dtype="float32", block_size=4, kernels="on", **settings)


def device_of(engine: Engine) -> CapturedRounds:
    assert engine.loop.rounds is not None
    device = engine.loop.rounds._device
    assert isinstance(device, CapturedRounds)
    return device


def warm_up(engine: Engine) -> None:
    """As a start on a GPU does it."""
    device = device_of(engine)
    device.warm_up()
    assert engine.policy is not None
    engine.policy.use_rounds(profile_device_rounds(device), device.bucket)


def play(engine: Engine, count: int) -> tuple[Any, list[RoundShape]]:
    """One answer, and the shapes of the rounds that gave it."""
    graphs = device_of(engine).graphs
    run, seen = graphs.run, []

    def watch(shape: RoundShape) -> bool:
        seen.append(shape)
        return run(shape)

    graphs.run = watch
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    (result,) = engine.generate([PROMPT], params)
    return result.outputs[0], seen


def plain_ids(folder: Path, count: int) -> list[int]:
    engine = Engine(folder, dtype="float32", speculate=0, kv_bytes=100 * BLOCK_BYTES)
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return ids_of(engine.generate([PROMPT], params))[0]


def test_a_good_head_drafts_and_a_bad_one_is_left_alone(tiny: Tiny) -> None:
    good = model(tiny)
    late = []
    for folder in (good, with_bad_head(good)):
        engine = start(folder)
        assert engine.policy is not None
        engine.policy.use_rounds(COSTS, int)
        answer, shapes = play(engine, 13)
        assert answer.token_ids == plain_ids(good, 13)
        assert "promise" in engine.stats.draft_reason
        late.append([shape.num_drafts for shape in shapes[-4:-2]])
    assert late == [[1, 1], [0, 0]]


def test_the_head_catches_up_after_rounds_without_drafts(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pauses for longer than its window, then drafts what one drafts that never paused."""
    monkeypatch.setattr(device_rounds, "WINDOW", 4)
    monkeypatch.setattr(memory, "MAX_DRAFTS", 1)
    accepted: list[dict[int, bool]] = []  # by position, where a token was drafted
    for pause in (0, 6):
        engine = start(model(tiny), speculate=1)
        assert engine.policy is not None

        final: list[int] = []  # slots that others may reuse

        def choose(requests: Any, num_running: int, pause: int = pause, **_: Any) -> Any:
            return {request: int(request.num_output >= pause) for request in requests}

        def register(request: Any, num_final: int, final: list[int] = final) -> None:
            final.append(num_final)

        engine.policy.choose = choose
        engine.scheduler.register = register
        answer, played = play(engine, 14)
        assert (max(final[:5]) == len(PROMPT)) == bool(pause), "the head has not read the others"
        shapes = {(shape.num_drafts, shape.head_rows) for shape in played}
        assert shapes == ({(0, 0), (0, 4), (1, 4), (1, 2)} if pause else {(1, 2)}), shapes
        origins = list(enumerate(answer.origins))[pause + 3 :]
        accepted.append({at: kind == "accepted" for at, kind in origins if kind != "bonus"})
    steady, paused = accepted
    both = steady.keys() & paused.keys()
    assert {steady[at] for at in both} == {True, False}
    assert not [at for at in both if steady[at] != paused[at]]


def test_rounds_are_profiled_at_start_and_that_changes_no_text(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_rounds, "WINDOW", 4)
    monkeypatch.setattr(memory, "MAX_DRAFTS", 1)
    monkeypatch.setattr(memory, "MENU", (0, 1))
    for name, value in (("_SHORT", 8), ("_LONG", 24), ("_REPEATS", 1)):
        monkeypatch.setattr(round_profile, name, value)
    engine = start(model(tiny), max_running_requests=1)
    warm_up(engine)
    assert engine.policy is not None and engine.policy.uniform_costs is not None
    table = engine.policy.uniform_costs.table
    assert [size for size, _ in table.verify] == [1] and table.menu == (0, 1)
    assert len(table.context) == len(table.catch_up) == 1
    assert all(table.round_seconds(1, drafts, 8) > 0 for drafts in table.menu)
    assert not device_of(engine).batch.lengths.any(), "blank requests are still there"
    assert play(engine, 3)[0].token_ids == plain_ids(model(tiny), 3)


def test_without_memory_to_profile_nothing_is_drafted(tiny: Tiny) -> None:
    engine = start(model(tiny), kv_bytes=12 * BLOCK_BYTES)
    warm_up(engine)
    assert {shape.num_drafts for shape in play(engine, 4)[1]} == {0}


def test_a_fixed_k_is_one_shape_to_the_end_of_an_answer(tiny: Tiny) -> None:
    """Regression: the last rounds drafted less, each a new shape to compile and capture."""
    _, shapes = play(start(model(tiny), speculate=2), 6)
    assert {(shape.num_drafts, shape.head_rows) for shape in shapes} == {(2, 3)}


def test_a_new_answer_has_nothing_to_catch_up_with(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: what the heads of earlier requests had not read was read for the next one."""
    monkeypatch.setattr(device_rounds, "WINDOW", 8)
    engine = start(model(tiny), speculate=1)
    assert engine.policy is not None
    for drafts in (0, 1):
        monkeypatch.setattr(
            engine.policy,
            "choose",
            lambda requests, drafts=drafts, **_: dict.fromkeys(requests, drafts),
        )
        _, shapes = play(engine, 6)
        found = {(shape.num_drafts, shape.head_rows) for shape in shapes}
        assert found == {(drafts, 2 * drafts)}


def test_a_round_is_timed_once(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: steps without a round before them gave the time of the last one again."""
    engine = start(model(tiny), speculate=1)
    timing, seen = RoundTiming(1, 1, 0.1), []
    monkeypatch.setattr(device_rounds.LaunchedRound, "timing", lambda _: timing)
    assert engine.policy is not None
    monkeypatch.setattr(engine.policy, "observe_round", lambda *round: seen.append(round))
    count = sum(len(play(engine, 4)[1]) for _ in range(2))
    assert len(seen) == count - 1, "the last one has not been read"
