"""Programs of `benchmarks` import each other as scripts do: from the folder they lie in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))


@pytest.fixture(scope="module", autouse=True)
def _quick(request: pytest.FixtureRequest) -> Iterator[None]:
    """Their kernels are interpreted where there is no GPU."""
    if find_spec("triton") is not None:
        request.getfixturevalue("quick_interpreter")
    yield
