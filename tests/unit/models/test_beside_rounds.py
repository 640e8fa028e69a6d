"""Weights that are read beside rounds are the same, in small pieces, and nothing stays changed."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from headstart.backends.cuda import int8
from headstart.backends.cuda.int8 import Int8Rows
from headstart.models import beside_rounds as tested
from headstart.models.linear import Linear


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (9, 2, 2), (0, 4)])
def test_pieces_make_the_whole(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    monkeypatch.setattr(tested, "PIECE_VALUES", 4)
    value, part = torch.randn(shape), torch.zeros(shape, dtype=torch.float64)
    with tested.beside_rounds():
        tested.send(value, part)
    assert torch.equal(part, value.double())


def test_8_bit_copies_are_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "PIECE_VALUES", 12)
    layer, paused = Linear(5, 7), []
    layer.weight.data = torch.randn(7, 5)
    usual = Int8Rows(layer)
    monkeypatch.setattr(int8, "pause", paused.append)
    with tested.beside_rounds():
        found = Int8Rows(layer)
    assert torch.equal(found.weight, usual.weight) and torch.equal(found.scales, usual.scales)
    assert len(paused) == 4  # two rows at a time


def test_the_interpreter_is_handed_over_sooner_and_only_inside() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(RuntimeError), tested.beside_rounds():
        assert tested.is_beside() and sys.getswitchinterval() < before
        raise RuntimeError
    assert sys.getswitchinterval() == before and not tested.is_beside()


def test_threads_that_overlap_leave_the_usual_interval() -> None:
    """The first to come leaves first: the second still loads, and then all is as it was."""
    usual = sys.getswitchinterval()
    is_inside, may_leave = threading.Event(), threading.Event()

    def load() -> None:
        with tested.beside_rounds():
            is_inside.set()
            may_leave.wait(30)

    first = threading.Thread(target=load)
    first.start()
    assert is_inside.wait(30)
    with tested.beside_rounds():
        may_leave.set()
        first.join(30)
        assert sys.getswitchinterval() < usual
    assert sys.getswitchinterval() == usual
