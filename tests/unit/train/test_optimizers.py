"""AdamW and Muon as one optimiser: which of them steps what, and going on where a run stopped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headstart.errors import ConfigError
from headstart.train.optimizers import STACKED_SHARE, Optimizer
from headstart.train.options import TrainOptions, resolve


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(3)
    shapes = {"matrix": (6, 4), "norm": (4,), "experts": (2, 3, 4), "unused": (4, 4)}
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def optimizer(own: dict[str, nn.Parameter], name: str, decay: float = 0.0) -> Optimizer:
    options = resolve(TrainOptions(optimizer=name, weight_decay=decay))
    return Optimizer(own, options, fused=False)


def step(own: dict[str, nn.Parameter], made: Optimizer, number: int, rate: float = 1e-2) -> None:
    drawn = torch.Generator().manual_seed(number)
    for name, parameter in own.items():
        if name != "unused":
            parameter.grad = torch.randn(parameter.shape, generator=drawn)
    made.step(rate)
    made.zero_grad()


def test_a_step_of_muon_is_equally_long_in_all_directions() -> None:
    own = parameters()
    before = own["matrix"].detach().clone()
    step(own, optimizer(own, "muon"), 0)
    lengths = torch.linalg.svdvals(own["matrix"].detach() - before)
    # PyTorch's five iterations are quick, not exact: 0.7 to 1.2 of what they aim at.
    aim = 1e-2 * 0.2 * 6**0.5
    assert bool(((lengths > 0.6 * aim) & (lengths < 1.3 * aim)).all()), lengths / aim
    own = parameters()
    step(own, optimizer(own, "adamw"), 0)
    lengths = torch.linalg.svdvals(own["matrix"].detach() - before)
    assert lengths.max() > 2 * lengths.min()  # the control


def test_what_is_no_matrix_is_stepped_as_by_adamw() -> None:
    ours, plain, slower = parameters(), parameters(), parameters()
    made, control = optimizer(ours, "muon", 0.1), optimizer(plain, "adamw", 0.1)
    slow = optimizer(slower, "adamw", 0.1)
    for number in range(3):
        step(ours, made, number)
        step(plain, control, number)
        step(slower, slow, number, 1e-2 * STACKED_SHARE)
    assert torch.equal(ours["norm"], plain["norm"])
    # Stacked matrices of experts get a rate that suits AdamW.
    assert torch.equal(ours["experts"], slower["experts"])
    assert not torch.equal(ours["experts"], plain["experts"])
    assert not torch.equal(ours["matrix"], plain["matrix"])
    assert torch.equal(ours["unused"], parameters()["unused"])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_run_goes_on_as_if_it_had_not_stopped(name: str) -> None:
    whole, stopped = parameters(), parameters()
    made, first = optimizer(whole, name), optimizer(stopped, name)
    for number in range(4):
        step(whole, made, number)
    for number in range(2):
        step(stopped, first, number)
    saved = {key: value.clone() for key, value in first.tensors().items()}
    again = optimizer(stopped, name)
    again.load(saved)
    for number in range(2, 4):
        step(stopped, again, number)
    for key, value in whole.items():
        assert torch.equal(stopped[key], value), key
    assert len(again.state) == 3  # nothing for what was never stepped


def test_muon_is_refused_where_matrices_are_split() -> None:
    with pytest.raises(ConfigError, match="--optimizer adamw"):
        resolve(TrainOptions(optimizer="muon", shard=True))
