"""All kernels here are interpreted where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest


@pytest.fixture(scope="module", autouse=True)
def _quick(request: pytest.FixtureRequest) -> Iterator[None]:
    if find_spec("triton") is not None:
        request.getfixturevalue("quick_interpreter")
    yield
