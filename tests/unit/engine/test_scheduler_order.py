"""Which requests go first, which are preempted, and which wait for others."""

from __future__ import annotations

from typing import Any

import pytest
from support.scheduler_steps import request, run, scheduler

from headstart.engine.request import MAX_PRIORITY, State


def test_the_more_important_request_starts_first_then_the_older_one() -> None:
    own = scheduler(max_running_requests=1)
    for name, arrival, priority in (("a", 1, 0), ("b", 2, 0), ("c", 3, -1)):
        own.add(request(name, 2, arrival, priority))
    order = []
    for _ in range(3):
        order += run(own, own.plan())
        own.remove(own.running[0])
    assert order == ["c", "a", "b"]


def test_waiting_makes_important_so_that_nobody_starves() -> None:
    own = scheduler(max_running_requests=1)
    late = request("z", 2, 0, priority=1)
    own.add(late)
    for turn in range(400):
        own.add(request("a", 2, turn + 1, priority=0))
        plan = own.plan()
        own.remove(own.running[0])
        if plan[0].request is late:
            break
    assert late.state is State.FINISHED
    assert turn > 200, "priority must count for something first"


def test_waiting_makes_up_for_every_priority_there_is() -> None:
    own = scheduler(max_running_requests=1)
    late = request("z", 2, 0, priority=MAX_PRIORITY)
    late.waited_steps = 20 * 256
    own.add(late)
    own.add(request("a", 2, 1, priority=-MAX_PRIORITY))
    assert own.plan()[0].request is late


def test_age_is_kept_so_that_the_aged_are_not_the_first_to_lose_their_memory_again() -> None:
    """Regression: age was forgotten at the start, and the next newcomer took the memory back."""
    own = scheduler(6, max_running_requests=2)
    late = request("z", 2, 0, priority=2)
    late.waited_steps = 600
    own.add(late)
    run(own, own.plan())
    own.add(request("a", 2, 1, priority=0))
    while own.num_preemptions == 0:
        run(own, own.plan())
    assert own.running == [late]


def test_waiting_again_after_preemption_adds_to_the_age() -> None:
    own = scheduler(4)
    first, second = request("a", 2, 0), request("b", 2, 1)
    second.waited_steps = 40
    own.add(first)
    own.add(second)
    for _ in range(8):
        run(own, own.plan())
    assert (second.state, second.waited_steps > 40) == (State.WAITING, True)


def test_siblings_follow_when_the_first_has_read_their_prompt() -> None:
    own = scheduler()
    first, again, third = (request("a", 6, arrival) for arrival in range(3))
    again.id, third.id = "a/1", "a/2"
    own.add(first, [again, third])
    assert own.has_siblings(first)
    assert run(own, own.plan()) == {"a": (0, 6, 0)}
    own.release_siblings(first)
    assert not own.has_siblings(first)
    assert run(own, own.plan()) == {"a": (6, 1, 0), "a/1": (4, 2, 0), "a/2": (4, 2, 0)}


@pytest.mark.parametrize(
    ("length", "options"), [(2, {}), (6, {"prefix_caching": False})], ids=["short", "no cache"]
)
def test_siblings_that_could_find_nothing_do_not_wait(length: int, options: Any) -> None:
    own = scheduler(**options)
    first, again = request("a", length), request("a", length, 1)
    again.id = "a/1"
    own.add(first, [again])
    assert set(run(own, own.plan())) == {"a", "a/1"}


def test_siblings_of_a_request_that_leaves_go_on_without_it() -> None:
    own = scheduler()
    first, again = request("a", 6), request("a", 6, 1)
    own.add(first, [again])
    own.remove(first)
    assert own.waiting == [again]


def test_the_least_important_request_gives_its_memory() -> None:
    own = scheduler(4)
    first, second = request("a", 2, 0), request("b", 2, 1)
    own.add(first)
    own.add(second)
    run(own, own.plan())
    run(own, own.plan())
    assert run(own, own.plan()) == {"a": (3, 1, 0)}
    assert (second.state, second.blocks, second.stats.num_preemptions) == (State.WAITING, [], 1)
    assert own.num_preemptions == 1
    assert own.take_restarted() == [second], "whose head starts again, too"
    assert own.take_restarted() == []
    own.remove(first)
    assert run(own, own.plan())["b"][1] >= 1, "it starts again, with its output"
    assert second.num_output == 3


def test_priority_decides_who_gives_memory() -> None:
    own = scheduler(4)
    important = request("b", 2, 1, priority=-1)
    own.add(request("a", 2, 0))
    own.add(important)
    run(own, own.plan())
    run(own, own.plan())
    run(own, own.plan())
    assert own.running == [important]
