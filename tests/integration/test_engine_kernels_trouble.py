"""Captured rounds when something goes wrong, or is not as usual; interpreted on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from support.engine_runs import ids_of
from support.tiny_fixture import Tiny
from test_engine_kernels import PROMPTS, SIZES, model, settings, start

pytest.importorskip("triton")

from headstart.backends.cuda.decode_batch import DecodeBatch
from headstart.backends.cuda.device_rounds import CapturedRounds
from headstart.engine.engine import Engine
from headstart.engine.loop import Loop

pytestmark = pytest.mark.usefixtures("quick_kernels")


def test_after_a_failed_step_no_request_stays_in_rounds(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a request with a first token entered rounds in the step after the failure."""
    engine = start(model(tiny), "on")
    wanted = ids_of(engine.generate(PROMPTS[:1], settings(4)[:1]))

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_commit", fail)  # first tokens are chosen by then
        engine.add(PROMPTS[1], settings(4)[0])
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
    engine.recover()
    assert ids_of(engine.generate(PROMPTS[:1], settings(4)[:1])) == wanted
    assert engine.loop.rounds is not None and not engine.loop.rounds.requests
    assert engine.pool.num_used == 0


def test_a_request_that_could_not_enter_leaves_its_index_free(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the device kept an index that the host did not know of."""
    engine = start(model(tiny), "on")
    wanted = ids_of(engine.generate(PROMPTS[:2], settings(4)[:2]))

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(DecodeBatch, "extend", fail)
        engine.add(PROMPTS[1], settings(4)[0])
        with pytest.raises(RuntimeError, match="out of memory"):
            for _ in range(3):
                engine.step()
    engine.recover()
    assert engine.loop.rounds is not None
    device = engine.loop.rounds._device
    assert isinstance(device, CapturedRounds)
    assert not device._params and not device.batch.lengths.any()
    assert ids_of(engine.generate(PROMPTS[:2], settings(4)[:2])) == wanted


def test_a_head_of_another_head_size_drafts_as_without_kernels(tiny: Tiny) -> None:
    """Regression: its keys were rotated by the trunk's table."""
    folder = model(tiny)
    other = tiny("mimo", rate=0.9, seed=1, dtype="F32", **{**SIZES, "head_dim": 32})

    def run(kernels: str) -> Any:
        engine = Engine(
            folder, other, dtype="float32", kernels=kernels, speculate=2, block_size=4,
            kv_bytes=200_000,
        )  # fmt: skip
        return engine.generate(PROMPTS[:2], settings(6)[:2])

    found, wanted = run("on"), run("off")
    assert ids_of(found) == ids_of(wanted)
    assert [r.stats.acceptance for r in found] == [r.stats.acceptance for r in wanted]


def test_as_many_enter_rounds_as_there_is_room_for(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: where not all that were ready fitted none entered, and none drafted either."""
    folder, greedy = model(tiny), [settings(4)[0]] * 3
    wanted = ids_of(start(folder, "off").generate(PROMPTS[:3], greedy))
    for most in (2, 0):
        engine = start(folder, "on")
        rounds, drafter = engine.loop.rounds, engine.loop.drafter
        assert rounds is not None and drafter is not None
        monkeypatch.setattr(
            rounds, "room", lambda most=most, rounds=rounds: max(0, most - len(rounds.requests))
        )
        with_host: list[int] = []
        propose = drafter.propose

        def watch(wishes: Any, propose: Any = propose, with_host: Any = with_host) -> None:
            with_host.append(len(wishes))
            propose(wishes)

        monkeypatch.setattr(drafter, "propose", watch)
        for prompt, params in zip(PROMPTS[:3], greedy, strict=True):
            engine.add(prompt, params, request_id=str(len(engine._groups)))
        engine.step()
        assert len(rounds.requests) == most and with_host == [3 - most]
        while engine.has_work:
            engine.step()
        assert ids_of([engine.collect(str(number)) for number in range(3)]) == wanted
