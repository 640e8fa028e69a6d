"""`make test-long` tries more of the same: every combination, more random examples."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")
IS_LONG = os.environ.get("HEADSTART_TEST_LONG") == "1"
# For what takes many seconds and is also shown by quicker tests, or is no part of the product.
long_only = pytest.mark.skipif(not IS_LONG, reason="runs in `make test-long`")


def unless_long(usual: T, long: T) -> T:
    """What is tried: usually a part that shows the claim, all of it in long runs."""
    return long if IS_LONG else usual


def one_of_each(count: int, cases: Iterable[T], first: int = 0) -> list[T]:
    """Usually one of every `count` cases, from `first` on; all of them in long runs."""
    found = list(cases)
    return unless_long(found[first::count], found)
