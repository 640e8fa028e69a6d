"""The garbage collector leaves alone what lives as long as an engine."""

from __future__ import annotations

import gc

from headstart.engine.core import _keep_pauses_short


class Owner:
    pass


def test_what_is_alive_is_left_out_until_its_owner_is_gone() -> None:
    gc.unfreeze()  # what tests before have left
    owner, thresholds = Owner(), gc.get_threshold()
    _keep_pauses_short(owner)
    assert gc.get_freeze_count() > 1000
    assert gc.get_threshold() == (10_000, *thresholds[1:])
    del owner
    assert gc.get_freeze_count() == 0 and gc.get_threshold() == thresholds
    gc.freeze()  # what was collected, again: tests/conftest.py
