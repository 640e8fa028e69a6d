"""Python's garbage collector goes through everything alive now and then, while the device waits.

With torch and its company loaded that takes 0.2 s, as long as twenty rounds of 80 requests.
"""

from __future__ import annotations

import gc
import weakref


def keep_pauses_short(owner: object) -> None:
    """What is alive now is left out of collections, for as long as `owner` lives."""
    gc.collect()
    gc.freeze()
    weakref.finalize(owner, gc.unfreeze)
