"""One loss from several depths: step weights, end-to-end TV, and gradients that reach the head."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.loss_reference import Case, case, close, reference
from torch import Tensor

from headstart.errors import ConfigError
from headstart.train.losses.combine import (
    attach,
    complete_rows,
    end_to_end_loss,
    end_to_end_weights,
    step_weights,
    weighted_loss,
)
from headstart.train.losses.lm_head import LmHead
from headstart.train.losses.rows import depth_losses


def test_step_weights_are_those_of_the_paper() -> None:
    assert [round(weight, 3) for weight in step_weights(0.6, 3)] == [0.510, 0.306, 0.184]
    assert step_weights(1.0, 3) == pytest.approx([1 / 3] * 3)
    assert [round(weight, 3) for weight in step_weights(0.5, 5)][:2] == [0.516, 0.258]
    with pytest.raises(ConfigError, match="beta is 0"):
        step_weights(0, 3)


def chain_of_depths() -> tuple[list[Tensor], list[Tensor], Case]:
    """Three depths over the same 13 targets: depth k's chain for target u starts at u - k."""
    rows = case()
    depths = [(rows.states * scale).requires_grad_() for scale in (1.0, 0.7, -0.3)]
    target = torch.arange(13)
    starts = [torch.where(target >= k, target - k, -1) for k in (1, 2, 3)]
    return depths, starts, rows


def test_weighted_loss_sends_the_weighted_gradients_of_counted_rows() -> None:
    depths, starts, rows = chain_of_depths()
    weights, normaliser = step_weights(0.6, 3), torch.tensor(29.0)
    straight = [reference("kl", rows, states)[0] for states in depths]
    expected = torch.stack(
        [w * (x * (t >= 0)).sum() / 29 for w, x, t in zip(weights, straight, starts, strict=True)]
    ).sum()
    gradients = torch.autograd.grad(expected, depths)
    losses = depth_losses(
        "kl", depths, LmHead.of(rows.weight), labels=rows.labels, teacher=rows.teacher
    )
    total = weighted_loss(depths, losses, starts, weights, normaliser)
    assert close(total.detach(), expected.detach())
    (3 * total).backward()
    for states, gradient in zip(depths, gradients, strict=True):
        assert states.grad is not None and close(states.grad, 3 * gradient)


def test_e2e_tv_surrogate_gradient_equals_autograd_of_the_product() -> None:
    depths, starts, rows = chain_of_depths()
    overlaps = [reference("tv", rows, states)[1] for states in depths]
    # Chain of row t: target t + 1 at depth 1, t + 2 at depth 2, t + 3 at depth 3.
    chain = torch.stack([overlaps[k - 1][k : k + 10] for k in (1, 2, 3)])
    expected = (1 - chain.cumprod(0).mean(0)).sum() / 17
    gradients = torch.autograd.grad(expected, depths)
    losses = depth_losses(
        "e2e-tv", depths, LmHead.of(rows.weight), labels=rows.labels, teacher=rows.teacher
    )
    total = end_to_end_loss(depths, losses, starts, 13, 17.0)
    assert close(total.detach(), expected.detach())
    total.backward()
    for states, gradient in zip(depths, gradients, strict=True):
        assert states.grad is not None and close(states.grad, gradient)
    # Control: the plain sum of TV rows has another gradient.
    fresh = [states.detach().clone().requires_grad_() for states in depths]
    weighted_loss(fresh, losses, starts, [1 / 3] * 3, 17.0).backward()
    assert fresh[0].grad is not None and not close(fresh[0].grad, gradients[0], within=1e-3)


def test_e2e_tv_uses_only_rows_with_all_targets() -> None:
    _, starts, _ = chain_of_depths()
    expected = torch.zeros(13, dtype=torch.bool)
    expected[:10] = True  # the last three rows lack a deeper target
    assert torch.equal(complete_rows(starts, 13), expected)
    starts[1][5] = -1  # target 5 at depth 2 belongs to the chain of row 3
    expected[3] = False
    assert torch.equal(complete_rows(starts, 13), expected)


def test_e2e_weights_survive_an_overlap_of_zero() -> None:
    overlaps = torch.tensor([[0.0, 0.5], [0.5, 0.0], [0.25, 0.5]], dtype=torch.float64)
    overlaps.requires_grad_()
    (expected,) = torch.autograd.grad(overlaps.cumprod(0).mean(0).sum(), overlaps)
    found = end_to_end_weights(overlaps.detach())
    assert close(found, expected) and found[0, 0] > 0 and found[1, 0] == 0


def test_a_state_used_twice_receives_both_gradients() -> None:
    states = torch.ones(2, 3, requires_grad=True)
    gradients = [torch.full((2, 3), 1.0), torch.full((2, 3), 10.0)]
    scales = [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.5])]
    loss = attach(torch.tensor(4.0), [states, states], gradients, scales) + states.sum()
    loss.backward()
    assert states.grad is not None
    assert torch.equal(states.grad, torch.tensor([[12.0] * 3, [8.0] * 3]))


def test_gradients_reach_the_weights_behind_gathered_states() -> None:
    """As the trainer uses it: gathered rows of a layer's output, against plain autograd."""
    rows = case()
    layer = torch.nn.Linear(6, 6, dtype=torch.float64)
    picked = torch.tensor([0, 3, 3, 7])
    sub = replace(rows, labels=rows.labels[picked], teacher=rows.teacher[picked])
    expected = reference("lk", sub, layer(rows.states)[picked])[0].sum() / 4
    straight = torch.autograd.grad(expected, list(layer.parameters()))
    states = layer(rows.states)[picked]
    found = replace(sub, states=states).losses("lk")
    assert not found.loss.requires_grad and not found.gradient.requires_grad
    weighted_loss([states], [found], [picked], [1.0], 4).backward()
    for parameter, gradient in zip(layer.parameters(), straight, strict=True):
        assert parameter.grad is not None and close(parameter.grad, gradient)
