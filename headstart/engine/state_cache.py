"""Recurrent states of requests: slots and snapshots, and where each step reads and writes.

A state is as large as the K/V of many tokens, so there are few slots. A request holds the slot of
its newest state, and during a step one for each draft row it may have to go back to. A snapshot is
the state at the end of a block, findable by that block's digest and held by no request: it makes a
prefix hit possible, and is given up when a request needs its slot. free + kept + held == total,
always.

A step reads the newest state and writes the one after its last row; where rows are drafts, one
after each, so that the request can go on from the last accepted row without computing anything
again. Snapshots are taken where hits are likely: at the last full block of a prompt, where a prompt
left the path of an earlier one, and at the newest full block of each running request, which
replaces the one before. Ints only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from headstart.backends.base import StateRows
from headstart.engine.kv_cache import Digest, extend_digests
from headstart.errors import EngineError

if TYPE_CHECKING:
    from headstart.engine.request import Request
    from headstart.engine.scheduler import Work


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


@dataclass
class StateTrack:
    """What one request has in the pool."""

    slot: int | None = None  # its newest state
    source: int | None = None  # the snapshot it begins with, held until it has been read
    fork: int = 0  # where a hit could have ended if there had been a snapshot
    latest: Digest | None = None  # its snapshot that the next one replaces
    taken: list[int] = field(default_factory=list)  # by the step under way, which may fail

    @property
    def held(self) -> list[int]:
        return [slot for slot in (self.slot, self.source, *self.taken) if slot is not None]


class StatePlan:
    def __init__(self, pool: StatePool, block_size: int, *, prefix_caching: bool):
        self.pool, self._size, self._is_caching = pool, block_size, prefix_caching

    def begin(self, request: Request, hit: Sequence[int]) -> list[int] | None:
        """Take a slot; returns the blocks of the hit that can be used, or None if none is left."""
        track = StateTrack()
        usable, source = len(hit), None
        while usable and (source := self.pool.find(request.digests[usable - 1])) is None:
            usable -= 1
        if source is not None:
            self.pool.take(source)  # before allocating, which may give up snapshots
        got = self.pool.allocate(1)
        if got is None:
            self.pool.release([source] if source is not None else [])
            return None
        track.slot, track.source = got[0], source
        track.fork = len(hit) * self._size if usable < len(hit) else 0
        request.states = track
        return list(hit[:usable])

    def release(self, request: Request) -> None:
        """Give up what a request holds; snapshots stay."""
        self.pool.release(request.states.held)
        request.states = StateTrack()

    def place(self, works: Sequence[Work]) -> list[Work]:
        """The same works with their slots; no snapshot takes one that a draft needs."""
        return [self._with_snapshots(work) for work in [self._with_chain(work) for work in works]]

    def _with_chain(self, work: Work) -> Work:
        """A slot for every row to go on from; fewer drafts where there are none for them."""
        track = work.request.states
        assert track.slot is not None
        drafts = min(len(work.drafts), self.pool.num_available)
        if drafts < len(work.drafts):
            count = work.count - len(work.drafts) + drafts
            work = replace(work, count=count, drafts=work.drafts[:drafts])
        own = self.pool.allocate(drafts) or []
        track.taken += own
        first = work.count - drafts
        chain = [*((first + i, slot) for i, slot in enumerate(own)), (work.count, track.slot)]
        source = track.slot if work.start else None
        if track.source is not None:
            source = track.source
        return replace(work, states=StateRows(source, tuple(chain)))

    def _with_snapshots(self, work: Work) -> Work:
        assert work.states is not None
        return replace(work, states=replace(work.states, snapshots=tuple(self._snapshots(work))))

    def _snapshots(self, work: Work) -> list[tuple[int, int]]:
        """Ends of blocks among a work's rows whose states are worth a slot."""
        if not self._is_caching:
            return []
        size, start, track = self._size, work.start, work.request.states
        if work.drafts:  # which rows will count is not known yet
            wanted = {end for end in range(start + 1, work.stop + 1) if end % size == 0}
        else:
            newest, text = work.stop // size * size, self._last_end(work.request)
            wanted = {end for end in (newest, text, track.fork)
                      if start < end <= work.stop}  # fmt: skip
        result = []
        for end in sorted(wanted):
            lasting = self._is_lasting(work.request, end)
            slot = self.pool.allocate_snapshot(lasting=lasting)
            # What this one would replace makes room for it; but not for a draft's end: should
            # that be rejected, both would be gone.
            is_sure = end <= work.stop - len(work.drafts)
            if slot is None and is_sure and track.latest is not None:
                self.pool.drop(track.latest)
                track.latest = None
                slot = self.pool.allocate_snapshot(lasting=lasting)
            if slot is not None:
                track.taken.append(slot)
                result.append((end - start, slot))
        return result

    def _last_end(self, request: Request) -> int:
        """The end of the last block that a hit on this prompt could cover."""
        return (request.num_prompt - 1) // self._size * self._size

    def _is_lasting(self, request: Request, end: int) -> bool:
        return end in (self._last_end(request), request.states.fork)

    def settle(self, work: Work, num_valid: int) -> None:
        """After a step: go on from the state after `num_valid` rows, and keep what may be hit."""
        request, rows = work.request, work.states
        assert rows is not None
        track = request.states
        track.taken = []  # given back, kept or the newest below
        if track.source is not None:
            self.pool.release([track.source])
            track.source = None
        for count, slot in rows.chain:
            if count == num_valid:
                track.slot = slot
            else:
                self.pool.release([slot])
        for count, slot in rows.snapshots:
            end = work.start + count
            # Tokens after a stop were computed and are not part of the text.
            if count <= num_valid and end <= len(request.tokens):
                self._keep(request, slot, end)
            else:
                self.pool.release([slot])

    def _keep(self, request: Request, slot: int, end: int) -> None:
        track = request.states
        extend_digests(
            request.digests, request.tokens, end // self._size, self._size, request.cache_root
        )
        digest = request.digests[end // self._size - 1]
        is_new = self.pool.find(digest) is None
        self.pool.keep(slot, digest)
        if self._is_lasting(request, end):
            return
        if track.latest is not None:
            self.pool.drop(track.latest)
        track.latest = digest if is_new else None
