"""The book of blocks, with ints only."""

from __future__ import annotations

import pytest

from headstart.engine.kv_cache import BlockPool, block_digest, extend_digests, root_digest
from headstart.errors import EngineError


def chain(tokens: list[int], size: int) -> list[bytes]:
    digests: list[bytes] = []
    for start in range(0, len(tokens) - size + 1, size):
        parent = digests[-1] if digests else b""
        digests.append(block_digest(parent, tokens[start : start + size]))
    return digests


def filled(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Allocate, register and release the blocks of a text."""
    digests = chain(tokens, pool.block_size)
    blocks = pool.allocate(len(digests))
    assert blocks is not None
    for block, digest in zip(blocks, digests, strict=True):
        pool.register(block, digest)
    pool.release(blocks)
    return blocks


def test_blocks_come_lowest_first_and_all_come_back() -> None:
    pool = BlockPool(4, 2)
    assert pool.allocate(3) == [0, 1, 2]
    pool.check([[0, 1, 2]])
    assert (pool.num_used, pool.num_available) == (3, 1)
    pool.release([0, 1, 2])
    pool.check([])
    assert pool.allocate(4) == [0, 1, 2, 3]


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    pool = BlockPool(3, 2)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(2) is None
    pool.check([[0, 1]])


def test_a_digest_covers_all_tokens_before_its_block() -> None:
    assert chain([1, 2, 3, 4], 2)[1] != chain([9, 2, 3, 4], 2)[1]
    assert chain([1, 2, 3, 4], 2)[0] == chain([1, 2, 9, 9], 2)[0]


@pytest.mark.parametrize(("one", "other"), [([1, 23], [12, 3]), ([1, 2], [2, 1]), ([12], [1, 2])])
def test_texts_that_look_alike_have_different_digests(one: list[int], other: list[int]) -> None:
    assert block_digest(b"", one) != block_digest(b"", other)


def test_a_match_never_covers_the_last_token() -> None:
    pool = BlockPool(4, 2)
    filled(pool, [1, 2, 3, 4])
    assert pool.match([1, 2, 3, 4, 5]) == [0, 1]
    assert pool.match([1, 2, 3, 4]) == [0]
    assert pool.match([1, 2]) == []
    assert pool.match([]) == []


def test_a_match_ends_where_the_texts_part() -> None:
    pool = BlockPool(6, 2)
    filled(pool, [1, 2, 3, 4, 5, 6])
    assert pool.match([1, 2, 3, 9, 5, 6, 7]) == [0]


def test_a_match_stops_at_a_block_that_was_evicted() -> None:
    pool = BlockPool(3, 1)
    filled(pool, [7, 8, 9])
    pool.allocate(1)  # takes the end of the text
    assert pool.match([7, 8, 9, 1]) == [0, 1]


def test_the_least_recently_used_text_is_evicted_first_and_its_end_before_its_start() -> None:
    pool = BlockPool(4, 2)
    old, new = filled(pool, [1, 2, 3, 4]), filled(pool, [5, 6, 7, 8])
    assert (old, new) == ([0, 1], [2, 3])
    assert pool.num_cached == 4
    assert [pool.allocate(1) for _ in range(4)] == [[1], [0], [3], [2]]


def test_using_a_text_again_makes_it_recent() -> None:
    pool = BlockPool(4, 2)
    filled(pool, [1, 2, 3, 4])
    filled(pool, [5, 6, 7, 8])
    hit = pool.match([1, 2, 3, 4, 0])
    pool.take(hit)
    pool.check([hit])
    pool.release(hit)
    assert pool.allocate(2) == [3, 2]


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(3, 2)
    filled(pool, [1, 2])
    assert pool.allocate(2) == [1, 2]
    assert pool.match([1, 2, 3]) == [0]


def test_a_held_block_is_never_evicted() -> None:
    pool = BlockPool(2, 2)
    filled(pool, [1, 2])
    pool.take(pool.match([1, 2, 3]))
    assert pool.allocate(2) is None
    assert pool.allocate(1) == [1]
    pool.check([[0], [1]])


def test_a_shared_block_is_free_when_its_last_holder_leaves() -> None:
    pool = BlockPool(2, 2)
    filled(pool, [1, 2])
    for _ in range(2):
        pool.take([0])
    pool.release([0])
    assert pool.num_used == 1
    pool.check([[0]])
    pool.release([0])
    assert pool.num_used == 0


def test_a_second_block_of_equal_content_stays_private() -> None:
    pool = BlockPool(3, 2)
    filled(pool, [1, 2])
    twin = pool.allocate(1)
    assert twin == [1]
    pool.register(1, chain([1, 2], 2)[0])
    pool.release(twin)
    assert pool.match([1, 2, 3]) == [0]
    pool.check([])


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(2, 2, prefix_caching=False)
    filled(pool, [1, 2])
    assert (pool.match([1, 2, 3]), pool.num_cached) == ([], 0)


def test_a_double_release_is_refused() -> None:
    pool = BlockPool(2, 2)
    pool.release(pool.allocate(1) or [])
    with pytest.raises(EngineError, match="block 0 was released twice"):
        pool.release([0])


def test_dropping_the_cache_keeps_what_is_held() -> None:
    pool = BlockPool(4, 2)
    filled(pool, [1, 2, 3, 4])
    pool.take([0])
    pool.drop_cache()
    assert (pool.num_cached, pool.match([1, 2, 3, 4, 5])) == (0, [0])
    pool.check([[0]])


@pytest.mark.parametrize(
    ("holders", "words"),
    [
        ([], "counts disagree"),
        ([[0, 1], [0]], "counts disagree"),
        ([[0, 0]], "holds a block twice"),
    ],
)
def test_a_wrong_book_is_noticed(holders: list[list[int]], words: str) -> None:
    pool = BlockPool(3, 2)
    pool.allocate(2)
    with pytest.raises(EngineError, match=words):
        pool.check(holders)


def test_a_block_in_two_places_is_noticed() -> None:
    pool = BlockPool(3, 2)
    pool.allocate(1)
    pool._free.append(0)
    with pytest.raises(EngineError, match="two places"):
        pool.check([[0]])


def test_texts_of_different_salts_share_no_block() -> None:
    pool, tokens = BlockPool(8, 2), [1, 2, 3, 4, 5]
    one = root_digest("one")
    digests: list[bytes] = []
    extend_digests(digests, tokens, 2, 2, one)
    blocks = pool.allocate(2)
    assert blocks is not None
    for block, digest in zip(blocks, digests, strict=True):
        pool.register(block, digest)
    assert pool.match(tokens, root=one) == blocks
    assert pool.match(tokens) == pool.match(tokens, root=root_digest("other")) == []
    assert root_digest(None) == b"" != root_digest("")
    assert root_digest("\ud800") != one
