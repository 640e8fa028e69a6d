"""Memory that large requests took goes back to the system, and not only to the allocator."""

from __future__ import annotations

import ctypes
import time

LARGE_BYTES = 1 << 20
_PATIENCE = 10.0  # seconds after a large request, where there is always another one


class LargeRequests:
    """Knows whether there were any since memory was last given back."""

    def __init__(self) -> None:
        self._latest: float | None = None

    def note(self, num_bytes: int) -> None:
        if num_bytes >= LARGE_BYTES:
            self._latest = time.monotonic()

    def are_over(self, *, is_idle: bool) -> bool:
        """Whether it is time to give memory back; then it is not for a while."""
        latest = self._latest
        if latest is None or not (is_idle or time.monotonic() - latest > _PATIENCE):
            return False
        self._latest = None
        return True


def give_back() -> None:
    """glibc keeps what was freed between blocks in use; elsewhere there is nothing to do."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
