"""What was made for requests and not been taken."""

from __future__ import annotations

from headstart.engine.groups import Groups
from headstart.engine.output import Update


def test_updates_that_will_not_be_taken_are_not_kept() -> None:
    groups = Groups()
    for name in ("whole", "streamed"):
        groups.open(name, [], is_claimed=True)
    groups.discard_updates(["whole"])
    groups.put(Update(name, 0, [1], "", [], [], None) for name in ("whole", "streamed"))
    whole, streamed = groups.find("whole"), groups.find("streamed")
    assert whole is not None and whole.take() == []
    assert streamed is not None and len(streamed.take()) == 1 and streamed.take() == []
