"""What was made for requests and not been taken."""

from __future__ import annotations

from headstart.engine.groups import Groups
from headstart.engine.outputs import Update


def test_updates_that_nobody_will_take_are_not_kept() -> None:
    groups = Groups()
    for name in ("whole", "streamed"):
        groups.open(name, [], is_claimed=True)
    groups.hush(["whole"])
    groups.put(Update(name, 0, [1], "", [], [], None) for name in ("whole", "streamed"))
    assert not groups.has_updates_of("whole")
    assert groups.has_updates_of("streamed")
