"""The demo's report: acceptance by depth among the rounds that drafted so deep."""

from __future__ import annotations

import platform

from headstart.bench.environment import processor_name
from headstart.demo.page import by_depth, known_depths
from headstart.sampling.acceptance import Acceptance


def test_a_depth_that_was_rarely_tried_does_not_look_like_a_failure() -> None:
    """Of 100 rounds ten drafted two tokens; eight of those second drafts were right."""
    found = Acceptance.of({(1, 1): 60, (1, 0): 30, (2, 2): 8, (2, 1): 1, (2, 0): 1})
    assert known_depths(found) == [(1, 0.69), (2, 0.8)]
    assert found.per_round[1] == 0.08, "which looked like a head that is wrong there"
    assert by_depth(found) == ["0.69", "0.80"]


def test_a_depth_of_a_few_rounds_has_no_rate() -> None:
    found = Acceptance.of({(1, 1): 60, (3, 3): 4})
    assert by_depth(found) == ["1.00"]
    assert by_depth(Acceptance.of({(0, 0): 9})) == []


def test_the_processor_has_a_name_where_the_system_tells_it() -> None:
    assert processor_name() and (
        processor_name() != platform.machine() or platform.system() != "Linux"
    )
