"""One thread for tests of small tensors: on a busy machine OpenMP's waiting costs minutes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_threads(one_thread: None) -> None:
    """For what must not depend on how torch splits its work."""
    torch.set_num_threads(2)
