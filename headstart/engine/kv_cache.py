"""Blocks of K/V memory: what is free, what can be reused, which request holds which. Ints only.

A block is free, cached (content known by its digest, held by no request), or used (held by one or
more requests). One block id covers the same slots in every layer of trunk and head, so there is
one table, one digest and one eviction order for all of them. free + cached + used == total,
always.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from headstart.errors import EngineError

if TYPE_CHECKING:
    from headstart.engine.request import Request

Digest = bytes
_WORTH_WAITING = 256  # tokens that another request reads, for which a step of waiting is worth it


def block_digest(parent: Digest, tokens: Sequence[int]) -> Digest:
    """Identity of a block: its tokens and all before them. A collision would give wrong text."""
    state = hashlib.blake2b(parent, digest_size=16)
    state.update(b",".join(str(token).encode() for token in tokens))
    return state.digest()


def root_digest(salt: str | None) -> Digest:
    """What comes before the first block: texts of different salts have no block in common."""
    if salt is None:
        return b""
    data = salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16, person=b"cache_salt").digest()


def extend_digests(
    digests: list[Digest], tokens: Sequence[int], num_blocks: int, block_size: int,
    root: Digest = b"",
) -> None:  # fmt: skip
    """Compute the digests of the first `num_blocks` blocks that are not known yet."""
    for index in range(len(digests), num_blocks):
        parent = digests[-1] if digests else root
        start = index * block_size
        digests.append(block_digest(parent, tokens[start : start + block_size]))


class BlockPool:
    """All blocks of one engine."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.is_caching = prefix_caching
        # Lowest id first: requests then tend to get consecutive blocks, which are read as a slice.
        self._free = list(range(num_blocks))
        self._holders = [0] * num_blocks
        self._digests: list[Digest | None] = [None] * num_blocks
        self._by_digest: dict[Digest, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_available(self) -> int:
        """Blocks that an allocation can have, by eviction if need be."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None (and nothing taken) if there are not enough."""
        if count > self.num_available:
            return None
        taken = []
        for _ in range(count):
            block = heapq.heappop(self._free) if self._free else self._evict()
            self._holders[block] = 1
            taken.append(block)
        return taken

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        digest = self._digests[block]
        assert digest is not None
        del self._by_digest[digest]
        self._digests[block] = None
        return block

    def match(
        self, tokens: Sequence[int], known: list[Digest] | None = None, root: Digest = b""
    ) -> list[int]:
        """The longest run of cached blocks that begins `tokens`; they are not taken yet.

        Never the whole text: at least the last token must run, for its logits. `known` are
        digests of the first blocks of `tokens`; those that had to be computed are added to it.
        `root` is the `root_digest` of the text's salt.
        """
        found: list[int] = []
        digests = known if known is not None else []
        size = self.block_size
        for index, start in enumerate(range(0, len(tokens) - size, size)):
            if index == len(digests):
                parent = digests[-1] if digests else root
                digests.append(block_digest(parent, tokens[start : start + size]))
            block = self._by_digest.get(digests[index])
            if block is None:
                break
            found.append(block)
        return found

    def num_shared(self, first: Sequence[int], second: Sequence[int]) -> int:
        """Tokens of the blocks that both texts begin with."""
        low, high = 0, min(len(first), len(second))
        while low < high:
            middle = (low + high + 1) // 2
            if first[low:middle] == second[low:middle]:
                low = middle
            else:
                high = middle - 1
        return low // self.block_size * self.block_size

    def take(self, blocks: Sequence[int]) -> None:
        """Hold blocks that `match` found."""
        for block in blocks:
            self._cached.pop(block, None)
            self._holders[block] += 1

    def register(self, block: int, digest: Digest) -> None:
        """Make a full, final block findable; a second block of equal content stays private."""
        if self.is_caching and self._digests[block] is None and digest not in self._by_digest:
            self._digests[block] = digest
            self._by_digest[digest] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Give up blocks; what is registered stays cached until its place is needed."""
        # The end of a text is the least likely part to be shared: it is evicted first.
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] < 0:
                raise EngineError(f"block {block} was released twice")
            if self._holders[block] == 0:
                if self._digests[block] is None:
                    heapq.heappush(self._free, block)
                else:
                    self._cached[block] = None

    def drop_cache(self) -> None:
        """Forget everything that no request holds."""
        while self._cached:
            heapq.heappush(self._free, self._evict())

    def check(self, holders: Sequence[Sequence[int]]) -> None:
        """Raise unless the books agree with the lists of blocks that requests hold."""
        held = [0] * self.num_blocks
        for blocks in holders:
            if len(set(blocks)) != len(blocks):
                raise EngineError(f"a request holds a block twice: {blocks}")
            for block in blocks:
                held[block] += 1
        if held != self._holders:
            raise EngineError("held blocks and their counts disagree")
        free, cached = set(self._free), set(self._cached)
        used = {block for block, count in enumerate(held) if count}
        if free & cached or free & used or cached & used:
            raise EngineError("a block is in two places")
        if len(free) + len(cached) + len(used) != self.num_blocks or len(free) != len(self._free):
            raise EngineError("free + cached + used is not the total")
        for digest, block in self._by_digest.items():
            if self._digests[block] != digest or block in free:
                raise EngineError(f"block {block} is registered and should not be")


class RequestBlocks:
    """What requests hold of a pool: found where a text begins like another, taken as it grows."""

    def __init__(self, pool: BlockPool):
        self.pool = pool
        # Of texts that wait, by request: tokens that they share with running ones.
        self._shared: dict[str, dict[str, int]] = {}

    def find(self, request: Request) -> list[int]:
        """Cached blocks that a request which waits could begin with."""
        found = self.pool.match(request.tokens, request.digests, request.cache_root)
        if request.prompt_scores is not None and request.is_scoring:
            # Rows that are found are not computed, and give no log-probabilities.
            return found[: request.prompt_scores.num_rows // self.pool.block_size]
        return found

    def is_being_read(
        self, request: Request, hit: Sequence[int], running: Iterable[Request]
    ) -> bool:
        """Whether a running request reads most of what this one lacks, which is cached then.

        Requests that begin together with one long prefix would all read it otherwise. A request
        that is less important gets rows last, so it is not waited for.
        """
        if not self.pool.is_caching or request.is_scoring:
            return False
        found = len(hit) * self.pool.block_size
        left = len(request.tokens) - found
        for other in running if left > _WORTH_WAITING else ():
            others = len(other.tokens) - other.num_computed
            if others <= 1 or other.cache_root != request.cache_root:  # it generates
                continue
            if other.importance > request.importance:
                continue
            known = self._shared.setdefault(request.id, {})
            if other.id not in known:  # texts that are read do not change
                known[other.id] = self.pool.num_shared(request.tokens, other.tokens)
            shared = known[other.id] - found
            if shared >= max(_WORTH_WAITING, left / 2, others / 2):
                return True
        return False

    def begin(self, request: Request, hit: Sequence[int]) -> None:
        """Let a request begin with blocks that were found."""
        self.pool.take(hit)
        request.blocks = list(hit)
        request.num_computed = request.num_cached = len(hit) * self.pool.block_size

    def fit(self, request: Request, slots: int) -> bool:
        """Whether there are blocks for so many slots of a request."""
        return -(-slots // self.pool.block_size) - len(request.blocks) <= self.pool.num_available

    def grow(self, request: Request, slots: int) -> bool:
        """Take blocks for so many slots; False, and none are taken, if there are not enough."""
        missing = -(-slots // self.pool.block_size) - len(request.blocks)
        got = self.pool.allocate(missing) if missing > 0 else []
        request.blocks += got or []
        return got is not None

    def forget(self, request: Request) -> None:
        """The request waits no longer."""
        self._shared.pop(request.id, None)
