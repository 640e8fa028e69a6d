"""Engines that share one model's weights and K/V memory, to be compared in turns.

Of eight engines alike with weights of their own, in one process and in turns, six took 3.92 to 3.98
ms a round and two 4.45 and 4.48; the cause is not known (docs/lab-log.md, 2026-11-19).
"""

from __future__ import annotations

from copy import copy

from headstart.engine.core import EngineCore
from headstart.engine.engine import Engine
from headstart.engine.groups import Groups
from headstart.engine.options import Speculate


def beside(engine: Engine, speculate: Speculate) -> Engine:
    """What serves other requests from the same memory, as an engine with other drafts does.

    Before the first request of any of them; on a CPU.
    """
    loop = engine.loop
    core = EngineCore(
        engine.backend, engine.options, engine.memory, engine.scheduler, loop.drafter,
        engine.policy, loop,
    ).beside(speculate)  # fmt: skip
    found = copy(engine)
    found.options, found.scheduler, found.policy = core.options, core.scheduler, core.policy
    found.loop, found.stats, found._groups = core.loop, core.loop.stats, Groups()
    return found
