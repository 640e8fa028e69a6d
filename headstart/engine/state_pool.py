"""Slots for recurrent states: which request holds which, which snapshots can be found. Ints only.

A state is as large as the K/V of many tokens, so there are few. A request holds the slot of its
newest state, and during a step one for each draft row it may have to go back to. A snapshot is
the state at the end of a block, findable by that block's digest and held by no request: it makes a
prefix hit possible, and is given up when a request needs its slot. free + kept + held == total,
always.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from headstart.engine.kv_cache import Digest
from headstart.errors import EngineError

_SNAPSHOT_PART = 4  # one slot in so many is for snapshots only


class StatePool:
    """All slots of one engine."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        # Else a queue of requests would take every snapshot, and no prefix would be found.
        self._for_snapshots = num_slots // _SNAPSHOT_PART
        self._free = list(range(num_slots))
        self._holders = [0] * num_slots
        self._digests: list[Digest | None] = [None] * num_slots
        self._by_digest: dict[Digest, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_available(self) -> int:
        """Slots that requests can have, by giving up snapshots if need be."""
        return max(0, self.num_slots - self._for_snapshots - self.num_held)

    @property
    def num_held(self) -> int:
        return self.num_slots - len(self._free) - len(self._kept)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def allocate(self, count: int) -> list[int] | None:
        """`count` slots, or None (and nothing taken) if there are not enough."""
        return [self._take() for _ in range(count)] if count <= self.num_available else None

    def allocate_snapshot(self, *, lasting: bool) -> int | None:
        """A slot for a snapshot, or None; only a lasting one takes the place of another."""
        return self._take() if self._free or (lasting and self._kept) else None

    def _take(self) -> int:
        if not self._free:
            self._forget(next(iter(self._kept)))
        slot = self._free.pop()
        self._holders[slot] = 1
        return slot

    def find(self, digest: Digest) -> int | None:
        """The snapshot at the end of a block, or None."""
        return self._by_digest.get(digest)

    def take(self, slot: int) -> None:
        """Hold a snapshot until it has been read."""
        self._kept.pop(slot, None)
        self._holders[slot] += 1

    def keep(self, slot: int, digest: Digest) -> None:
        """Make a held slot a snapshot; one of equal content is not needed twice."""
        if digest not in self._by_digest:
            self._digests[slot] = digest
            self._by_digest[digest] = slot
        self.release([slot])

    def release(self, slots: Sequence[int]) -> None:
        """Give up slots; snapshots stay until their place is needed."""
        for slot in slots:
            self._holders[slot] -= 1
            if self._holders[slot] < 0:
                raise EngineError(f"state slot {slot} was released twice")
            if self._holders[slot] == 0 and self._digests[slot] is None:
                self._free.append(slot)
            elif self._holders[slot] == 0:
                self._kept[slot] = None

    def drop(self, digest: Digest) -> None:
        """Give up a snapshot that a later one has made useless, unless a request reads it."""
        slot = self._by_digest.get(digest)
        if slot is not None and slot in self._kept:
            self._forget(slot)

    def _forget(self, slot: int) -> None:
        del self._kept[slot]
        digest = self._digests[slot]
        assert digest is not None
        del self._by_digest[digest]
        self._digests[slot] = None
        self._free.append(slot)

    def check(self, held: Sequence[int]) -> None:
        """Raise unless the books agree with the slots that requests hold between steps."""
        if sorted(held) != [slot for slot, count in enumerate(self._holders) for _ in range(count)]:
            raise EngineError("held state slots and their counts disagree")
        # Several may read one snapshot, which can be found all the while.
        places = [*self._free, *self._kept, *set(held)]
        if sorted(places) != list(range(self.num_slots)):
            raise EngineError("free + kept + held state slots are not the total")
        unread = {slot for slot in self._by_digest.values() if not self._holders[slot]}
        if unread != set(self._kept):
            raise EngineError("a snapshot can be found and is not kept")
