"""When newcomers go without a head."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from headstart.engine.headless import Headless
from headstart.engine.options import EngineOptions
from headstart.engine.request import Request
from headstart.sampling.params import SamplingParams


@dataclass
class Knowing:
    """A `Speculation` that is told what drafts are worth."""

    worth: float | None = None

    def prospect(self, batch: int, context: int) -> float | None:
        return self.worth

    def is_automatic(self, request: Request) -> bool:
        return True


@pytest.mark.parametrize(
    ("prospects", "without"),
    [([0.995], False), ([0.98], True), ([0.98, 1.02], True), ([0.98, 1.04], False),
     ([0.98, 1.04, 0.995], False), ([0.98, None], False)],
    ids=["nearly pays", "does not", "nearly pays again", "pays again", "stays so", "forgotten"],
)  # fmt: skip
def test_a_decision_stands_until_it_is_clearly_wrong(
    prospects: list[float | None], without: bool
) -> None:
    knowing = Knowing()
    own = Headless(EngineOptions(), knowing, lambda request: True)  # type: ignore[arg-type]
    newcomer = Request("r", [1, 2], SamplingParams(), 0, 1, frozenset(), arrival=1)
    for knowing.worth in prospects:
        own.look([], [newcomer])
    assert own.goes_without(newcomer) is without
