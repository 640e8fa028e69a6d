"""Ticks are round, cover the values, and can be told apart, whatever the values are."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.report.axes import Axis, axis, usable


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.0, 1.0], (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        ([0.13, 0.31], (0.1, 0.15, 0.2, 0.25, 0.3, 0.35)),
        ([3, 97], (0, 20, 40, 60, 80, 100)),
        ([-4.2, 5.9], (-6, -4, -2, 0, 2, 4, 6)),
    ],
    ids=["unit", "inside", "hundred", "around-zero"],
)
def test_ticks_are_round_numbers_around_the_values(
    values: list[float], ticks: tuple[float, ...]
) -> None:
    assert axis(values).ticks == ticks


def test_an_axis_that_does_not_snap_ends_at_the_values() -> None:
    unsnapped = axis([0, 1990], snap=False)
    assert (unsnapped.low, unsnapped.high) == (0, 1990)
    assert unsnapped.ticks == (0, 500, 1000, 1500)


def test_whole_axes_have_no_tick_between_integers() -> None:
    assert axis([1, 3], whole=True).ticks == (1, 2, 3)
    assert axis([1, 3]).ticks == (1, 1.5, 2, 2.5, 3)


def test_bars_start_at_zero_also_below_it() -> None:
    assert axis([80, 95], from_zero=True).low == 0
    assert axis([-80, -95], from_zero=True).high == 0


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0, 4e7], ("0", "1e7", "2e7", "3e7", "4e7")),
        ([0, 4e-5], ("0", "1e-5", "2e-5", "3e-5", "4e-5")),
        ([0, 2e6], ("0", "0.5e6", "1.0e6", "1.5e6", "2.0e6")),
        ([0, 10_000], ("0", "2,000", "4,000", "6,000", "8,000", "10,000")),
        ([1e9, 1e9 + 2], tuple(f"1,000,000,00{d}" for d in ("0.0", "0.5", "1.0", "1.5", "2.0"))),
    ],
    ids=["large", "small", "shared-exponent", "thousands", "far-from-zero"],
)
def test_labels_have_the_digits_they_need(values: list[float], labels: tuple[str, ...]) -> None:
    assert axis(values).labels == labels


@pytest.mark.parametrize("value", [0.0, 3.2, -7.0, 1e300, 1e-200, 5e-324])
@pytest.mark.parametrize("whole", [True, False])
def test_one_value_gets_an_axis_around_it(value: float, whole: bool) -> None:
    one = axis([value], whole=whole)
    assert one.low <= value <= one.high
    assert one.low < one.high


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, -math.inf]], ids=str)
def test_without_a_usable_value_there_still_is_an_axis(values: list[float]) -> None:
    assert (axis(values).low, axis(values).high) == (0, 1)


def test_values_that_are_not_finite_do_not_stretch_the_axis() -> None:
    assert axis([1, math.nan, 2, math.inf]) == axis([1, 2])
    assert not usable(math.nan)
    assert not usable(1.7e308)


@given(
    st.lists(st.floats() | st.floats(-10, 10).map(round), max_size=5),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_any_values_get_a_few_rising_ticks_with_different_labels(
    values: list[float], from_zero: bool, whole: bool, snap: bool
) -> None:
    whole = whole and all(float(value).is_integer() for value in values)
    made = axis(values, from_zero=from_zero, whole=whole, snap=snap)
    assert 2 <= len(made.ticks) <= 12
    assert list(made.ticks) == sorted(set(made.ticks))
    assert len(set(made.labels)) == len(made.labels)
    assert all(-1e-6 <= made.share(value) <= 1 + 1e-6 for value in values if usable(value))


def test_share_is_the_place_on_the_axis() -> None:
    assert Axis(10.0, 20.0, (), ()).share(12.5) == 0.25
