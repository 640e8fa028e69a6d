"""What the compiler would refuse in variants of kernels that no test compiles."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.kernel_sources import functions, returned_nones, truths_of_numbers

import headstart

FOLDER = Path(headstart.__file__).parent / "backends" / "cuda" / "kernels"
KERNELS = [kernel for file in sorted(FOLDER.glob("*.py")) for kernel in functions(file.read_text())]

# Both were refused on a GPU and had passed all tests: those compiled other variants.
LIMITED = """
@jit
def gated(gate, up, LIMIT: tl.constexpr = 0):
    value = gate * tl.sigmoid(gate)
    if {test}:
        value = tl.minimum(value, LIMIT)
    return value * up
"""
PLACED = """
@jit(do_not_specialize=["rows"])
def matrix_of(expert, scales, zeros, shared, shared_zeros):
    base = scales
    zero = {start}
    if zeros is not None:
        zero = zeros + expert
    if shared is not None:
        base = shared
    return base, zero
"""


def test_no_float_decides_and_no_function_returns_none() -> None:
    assert len(KERNELS) > 150
    assert truths_of_numbers(KERNELS) == []
    assert [found for kernel in KERNELS for found in returned_nones(kernel)] == []


@pytest.mark.parametrize(
    ("test", "found"),
    [
        ("LIMIT", ["gated, line 5: LIMIT"]),
        ("not LIMIT or gate is None", ["gated, line 5: LIMIT"]),
        ("LIMIT > 0", []),
    ],
)
def test_the_truth_of_a_number_is_found(test: str, found: list[str]) -> None:
    assert truths_of_numbers(functions(LIMITED.format(test=test))) == found


def test_a_number_of_one_kernel_is_one_in_all() -> None:
    """Where a kernel only hands it on, its truth is that of a float, too."""
    caller = (
        "@jit\ndef _silu(rows, LIMIT: tl.constexpr):\n    if LIMIT:\n        gated(rows, LIMIT)"
    )
    kernels = [*functions(caller), *functions(LIMITED.format(test="LIMIT > 0"))]
    assert truths_of_numbers(kernels[:1]) == []
    assert truths_of_numbers(kernels) == ["_silu, line 3: LIMIT"]


@pytest.mark.parametrize(
    ("start", "found"),
    [
        ("zeros", ["matrix_of, line 10: zero"]),
        ("None", ["matrix_of, line 10: zero"]),
        ("scales", []),
    ],
)
def test_a_returned_none_is_found(start: str, found: list[str]) -> None:
    (kernel,) = functions(PLACED.format(start=start))
    assert returned_nones(kernel) == found
    plain = "@jit\ndef nothing(x):\n    return x, None"
    assert returned_nones(functions(plain)[0]) == ["nothing, line 3: None"]
