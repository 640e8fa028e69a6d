"""Values as readers want them, and tables that are what they say."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from headstart.report.tables import shown, table


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\u2013"),
        (True, "yes"),
        (1234567, "1,234,567"),
        ("20240101", "20240101"),
        (0.5, "0.5"),
        (2.0, "2"),
        (0.123456, "0.1235"),
        (12345.678, "12,346"),
        (5e-5, "0.00005"),
        (1.23456e-9, "1.235e-09"),
        (3.2e12, "3.2e+12"),
        (-0.0, "0"),
        (math.nan, "NaN"),
        (-math.inf, "-\u221e"),
        ([1, 2.5, "x"], "1, 2.5, x"),
        ((), "\u2013"),
    ],
    ids=repr,
)
def test_values_are_written_for_readers(value: object, text: str) -> None:
    assert shown(value) == text


def column(values: list[object]) -> list[str | None]:
    made = ET.fromstring(table(["name", "value"], [["row", value] for value in values], "t"))
    return [cell.text for cell in made.iter("td")]


def test_numbers_of_a_column_share_their_decimals() -> None:
    assert column([2.9388, 0.5, 1.12751]) == ["2.939", "0.500", "1.128"]
    assert column([2.0, 30.0]) == ["2", "30"]


def test_a_small_value_beside_a_large_one_is_not_rounded_to_zero() -> None:
    assert column([2.9388, 0.0055]) == ["2.9388", "0.0055"]


def test_columns_over_a_wide_range_share_nothing() -> None:
    assert column([123456.0, 0.00012, math.nan]) == ["123,456", "0.00012", "NaN"]


def test_numbers_stand_on_the_right_and_text_on_the_left() -> None:
    made = ET.fromstring(table(["a", "b"], [["x", 1], ["y", None]], "t"))
    assert [head.get("class") for head in made.iter("th")] == [None, "number", None, None]


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="2 columns, but a row of 1"):
        table(["a", "b"], [["x"]], "t")
