"""What context adds is taken from passes in turns, and no round comes to take less than nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headstart.engine.auto import blank_passes, context_times
from headstart.engine.auto.blank_passes import BlankPasses, Timed
from headstart.engine.auto.context_times import RealRound, limited, time_context
from headstart.engine.auto.costs import Curve, level
from headstart.engine.auto.host_times import HostTimes
from headstart.engine.auto.timed_rounds import Serving
from headstart.sampling.params import SamplingParams

COUNTS, REQUESTS = (0, 2, 8), 3


@pytest.fixture
def slopes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Curve]:
    """Of passes that take 1 + drafts / 10 s, and per token of a request 0.001 s and as much for
    each draft; slower by a factor during some of them."""

    def measure(slow: range = range(0), factor: float = 1.0, room: int = 1 << 20) -> Curve:
        now, runs = [0.0], [0]

        class Passes(BlankPasses):
            def __init__(self, backend: Any, drafter: Any, *, max_rows: int, context: int):
                self.backend, self.context = backend, context

            def has_room(self, batch: int, drafts: int) -> bool:
                return batch * self.context <= room

            def verification(self, batch: int, drafts: int, params: SamplingParams) -> Timed:
                return Timed(
                    partial(self.take, 1 + drafts / 10 + 1e-3 * (1 + drafts) * self.context)
                )

            def take(self, seconds: float) -> None:
                now[0] += seconds * (factor if runs[0] in slow else 1.0)
                runs[0] += 1

        monkeypatch.setattr(context_times, "BlankPasses", Passes)
        monkeypatch.setattr(blank_passes.time, "perf_counter", lambda: now[0])
        device = SimpleNamespace(type="cpu")
        core = SimpleNamespace(
            options=SimpleNamespace(num_rows=99), backend=SimpleNamespace(device=device),
            drafter=None,
        )  # fmt: skip
        serving = Serving(SamplingParams(), [[1]], 64, REQUESTS)
        return time_context(cast(Any, core), serving, COUNTS)

    return measure


def is_expected(curve: Curve) -> bool:
    return [k for k, _ in curve] == [*COUNTS] and all(
        seconds == pytest.approx(1e-3 * (1 + k) / REQUESTS) for k, seconds in curve
    )


def test_what_a_token_adds_is_the_difference_of_long_and_short_contexts(slopes: Any) -> None:
    assert is_expected(slopes())
    assert is_expected(slopes(room=REQUESTS * 512)), "shorter ones where memory is little"
    assert slopes(room=REQUESTS * 100) == (), "it is not counted"


@pytest.mark.parametrize("start", range(0, 30, 3))
def test_a_machine_that_is_slow_for_a_while_changes_nothing(slopes: Any, start: int) -> None:
    """All short contexts came before all long ones, which might then be slower by themselves."""
    assert is_expected(slopes(range(start, start + 15), 10.0))


@pytest.mark.parametrize("per_token", [0.0, 1e-3, 5.0])
@pytest.mark.parametrize("at", range(3))
def test_no_round_takes_less_than_a_tenth_of_what_was_timed(per_token: float, at: int) -> None:
    """Of one number of drafts a token may seem to add seconds: rounds came to take less than 0."""
    usual, context = [0.05, 0.06, 0.04, 0.08, 0.3], 500.0
    drafts, contexts = [0, 1, 2, 5, 16], [480.0, 520.0, 400.0, 900.0, 700.0]
    real = [RealRound(*each) for each in zip(drafts, usual, contexts, strict=True)]
    timed = tuple((k, per_token if place == at else 1e-6) for place, k in enumerate(COUNTS))
    times = HostTimes({}, context, limited(timed, real, context))
    seconds = [own.seconds - times.added(own.drafts, own.context) for own in real]
    curve = level([*zip(drafts, seconds, strict=True)])
    for tokens in (0.0, 100.0, 5000.0):
        for (k, own), (_, leveled) in zip(zip(drafts, seconds, strict=True), curve, strict=True):
            assert own + times.added(k, tokens) >= 0.1 * min(usual) > 0
            assert leveled + times.added(k, tokens) >= 0.1 * min(usual)
    sound = ((0, 1e-5), (8, 3e-5))
    assert limited(sound, real, context) == sound, "what is possible is left as it is"
