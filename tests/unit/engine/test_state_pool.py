"""Slots of recurrent states: books, snapshots, and what is given up for whom."""

from __future__ import annotations

import pytest
from support.scheduler_steps import request

from headstart.engine.request import Request
from headstart.engine.scheduler import Work
from headstart.engine.state_cache import StatePlan, StatePool
from headstart.errors import EngineError


def snapshot(pool: StatePool, digest: bytes) -> int:
    slot = pool.allocate_snapshot(lasting=True)
    assert slot is not None
    pool.keep(slot, digest)
    return slot


def test_a_snapshot_is_found_until_its_slot_is_needed() -> None:
    pool = StatePool(3)
    old, new = snapshot(pool, b"old"), snapshot(pool, b"new")
    assert (pool.find(b"old"), pool.find(b"new"), pool.num_kept) == (old, new, 2)
    held = pool.allocate(2)
    assert held is not None and old in held
    assert (pool.find(b"old"), pool.find(b"new")) == (None, new)
    pool.check(held)


def test_a_snapshot_that_is_being_read_is_not_given_up() -> None:
    pool = StatePool(2)
    slot = snapshot(pool, b"prefix")
    pool.take(slot)
    assert pool.allocate(2) is None
    (other,) = pool.allocate(1) or [-1]
    assert other != slot and pool.find(b"prefix") == slot
    pool.drop(b"prefix")
    assert pool.find(b"prefix") == slot


def test_requests_leave_a_part_to_snapshots() -> None:
    pool = StatePool(8)
    assert pool.num_available == 6
    assert pool.allocate(7) is None and pool.num_held == 0
    assert pool.allocate(6) is not None
    assert pool.allocate_snapshot(lasting=False) is not None


def test_only_a_lasting_snapshot_takes_the_place_of_another() -> None:
    pool = StatePool(1)
    snapshot(pool, b"first")
    assert pool.allocate_snapshot(lasting=False) is None
    snapshot(pool, b"second")
    assert pool.find(b"first") is None


def test_equal_states_are_kept_once() -> None:
    pool = StatePool(2)
    first = snapshot(pool, b"same")
    snapshot(pool, b"same")
    assert pool.find(b"same") == first and pool.num_kept == 1
    pool.check([])


def test_wrong_books_are_noticed() -> None:
    pool = StatePool(2)
    held = pool.allocate(1) or []
    with pytest.raises(EngineError, match="held state slots and their counts disagree"):
        pool.check([])
    pool.release(held)
    with pytest.raises(EngineError, match="was released twice"):
        pool.release(held)


@pytest.mark.parametrize("valid", [1, 2, 3])
def test_a_request_goes_on_from_the_slot_of_its_last_accepted_row(valid: int) -> None:
    pool = StatePool(8)
    plan = StatePlan(pool, 4, prefix_caching=False)
    one = request("r", 9)
    assert plan.begin(one, []) == []
    (work,) = plan.place([Work(one, 8, 3, (1, 2))])
    assert work.states is not None
    slots = dict(work.states.chain)
    assert sorted(slots) == [1, 2, 3] and len(set(slots.values())) == 3
    plan.settle(work, valid)
    assert one.states.slot == slots[valid]
    pool.check(one.states.held)
    plan.release(one)
    pool.check([])


def test_drafts_are_dropped_where_there_are_no_slots_for_them() -> None:
    pool = StatePool(3)
    plan = StatePlan(pool, 4, prefix_caching=False)
    one, other = request("r", 9), request("s", 9)
    plan.begin(one, [])
    plan.begin(other, [])
    (work,) = plan.place([Work(one, 8, 4, (1, 2, 3))])
    assert (work.count, work.drafts) == (2, (1,))
    assert plan.begin(request("t", 1), []) is None


def test_a_neighbours_snapshot_takes_no_slot_that_a_draft_needs() -> None:
    """Slots as planned for two requests with two drafts: all are drafted, with a snapshot each."""
    pool = StatePool(2 * (2 + 2))
    plan = StatePlan(pool, 4, prefix_caching=True)
    both = request("r", 7), request("s", 7)
    for one in both:
        plan.begin(one, [])
    works = plan.place([Work(one, 6, 3, (1, 2)) for one in both])  # the second row ends a block
    assert [work.drafts for work in works] == [(1, 2)] * 2
    assert [len(work.states.snapshots) for work in works if work.states is not None] == [1, 1]


def test_two_requests_may_read_one_snapshot() -> None:
    pool = StatePool(3)
    slot = snapshot(pool, b"prefix")
    pool.take(slot)
    pool.take(slot)
    pool.check([slot, slot])
    with pytest.raises(EngineError, match="held state slots and their counts disagree"):
        pool.check([slot])
    pool.release([slot, slot])
    pool.check([])
    pool._kept.clear()
    with pytest.raises(EngineError, match="are not the total"):
        pool.check([])


def with_a_snapshot(tokens: int, *, free: int) -> tuple[StatePlan, Request]:
    """A request that has one, among five that hold a slot; so many are free, others are kept."""
    pool = StatePool(8)
    plan = StatePlan(pool, 4, prefix_caching=True)
    one = request("r", tokens)
    plan.begin(one, [])
    assert pool.allocate(4) is not None
    names = [b"own", b"first", b"second"][: 3 - free]
    for name in names:
        snapshot(pool, name)
    one.states.latest = b"own"
    return plan, one


def test_no_snapshot_is_given_up_for_one_at_the_end_of_a_draft() -> None:
    plan, one = with_a_snapshot(7, free=1)
    (work,) = plan.place([Work(one, 6, 2, (1,))])  # the draft ends a block, and takes the last slot
    assert work.states is not None and work.drafts == (1,)
    assert not work.states.snapshots
    assert plan.pool.find(b"own") is not None and one.states.latest == b"own"


@pytest.mark.parametrize("drafts", [(), (1,)], ids=["no draft", "before the draft"])
def test_a_snapshot_makes_room_for_one_that_is_sure_to_come(drafts: tuple[int, ...]) -> None:
    plan, one = with_a_snapshot(8, free=len(drafts))
    (work,) = plan.place([Work(one, 7, 1 + len(drafts), drafts)])  # the newest token ends a block
    assert work.states is not None and work.drafts == drafts
    assert [count for count, _ in work.states.snapshots] == [1]
    assert plan.pool.find(b"own") is None and plan.pool.find(b"first") is not None
    assert one.states.latest is None, "another request's snapshot of that name is not its own"
