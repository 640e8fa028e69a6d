"""Choices stay what they were: numbers that two cost models gave before they became one.

Rounds that the host drives and captured rounds had tables and choices of their own.
"""

from __future__ import annotations

import random

import pytest

from headstart.engine.auto.costs import Curve, RoundCosts, Surface
from headstart.engine.auto.live_costs import Choice, LiveCosts
from headstart.engine.options import MENU

BATCHES = (1, 4, 16)


def surface(draw: random.Random, each: float) -> Surface:
    return tuple(
        (b, tuple((k, (1 + each * k) * (1 + b / 16) * draw.uniform(0.9, 1.1)) for k in MENU))
        for b in BATCHES
    )


def curve(draw: random.Random, most: float) -> Curve:
    return tuple((b, draw.uniform(0.1, 1) * most) for b in BATCHES)


def gains(draw: random.Random, count: int, depths: int) -> list[list[float]]:
    rates = [draw.uniform(0.2, 0.95) for _ in range(count)]
    return [[rate**depth for depth in range(1, depths + 1)] for rate in rates]


def told(choice: Choice) -> list[float]:
    return [choice.speed, choice.plain_speed, choice.full_speed, choice.break_even]


# By seed: the drafts of six requests, then the speed as chosen, without drafts and with all, and
# how often a draft must be right to pay.
OWN_K = {
    0: ([2, 1, 2, 3, 8, 8], [5.716493382, 4.226600560, 5.353040047, 0.224648184]),
    1: ([2, 3, 1, 2, 3, 3], [5.496438070, 2.806513922, 3.867159915, 0.134787598]),
    2: ([4, 8, 5, 6, 2, 1], [5.230590769, 3.203087435, 5.075153068, 0.119784038]),
    3: ([1, 0, 5, 1, 3, 5], [6.253980546, 4.629603094, 5.070353030, 0.400583370]),
}
# The same of four rounds, one after the other, whose six requests share one K each.
ONE_K = {
    1: ([8, 8, 8, 5], [
        10.177616863, 1.744866229, 10.177616863, 0.174009042,
        8.543517275, 2.098754160, 8.543517275, 0.174061724,
        8.350279318, 4.408263288, 8.350279318, 0.173113807,
        6.834200526, 3.628920891, 6.700147137, -0.373281087,
    ]),
    2: ([5, 3, 3, 3], [
        12.823904794, 6.892334816, 10.151119850, -0.170654179,
        12.260483253, 7.664013970, 5.313264566, -0.136376154,
        14.303943198, 7.987964350, 6.787792811, -0.151496616,
        12.509984240, 7.969340774, 5.361016958, -0.349501627,
    ]),
    4: ([5, 5, 3, 3], [
        12.074188349, 5.360576676, 4.202675513, -0.173672160,
        15.235852913, 5.723921743, 9.361838976, -0.207347383,
        10.339997242, 6.088930589, 7.076500395, -0.321753069,
        8.062621339, 4.208757132, 6.480384893, -0.546184289,
    ]),
}  # fmt: skip


@pytest.mark.parametrize("seed", OWN_K)
def test_each_request_has_the_k_that_it_had(seed: int) -> None:
    draw = random.Random(seed)
    table = RoundCosts(surface(draw, 0.1), curve(draw, 0.2), curve(draw, 0.1))
    costs = LiveCosts(table)
    free, fixed = gains(draw, 6, 8), gains(draw, seed % 3, 3)
    choice = costs.best(free, fixed, context=1000)
    drafts, numbers = OWN_K[seed]
    assert choice.drafts == drafts
    assert told(choice) == pytest.approx(numbers, abs=1e-9)


@pytest.mark.parametrize("seed", ONE_K)
def test_all_requests_have_the_k_that_they_had(seed: int) -> None:
    draw = random.Random(seed)
    table = RoundCosts(
        surface(draw, 0.3), context=surface(draw, 0.1), catch_up=curve(draw, 0.5), window=15
    )
    costs = LiveCosts(table, uniform=True, captured_size=lambda count: 4 * -(-count // 4))
    ks, numbers = [], []
    for _ in range(4):
        for _ in range(5):
            size, k, context = draw.choice([4, 8]), draw.choice(MENU), draw.randint(0, 3)
            costs.observe_verify(size, size * (k + 1), draw.uniform(2, 5), context)
        choice = costs.best(gains(draw, 6, 8), gains(draw, seed % 3, 3), context=seed % 2)
        assert len(set(choice.drafts)) == 1
        ks.append(choice.drafts[0])
        numbers += told(choice)
    assert ks == ONE_K[seed][0]
    assert numbers == pytest.approx(ONE_K[seed][1], abs=1e-9)
