"""What turns gradients into steps: AdamW for everything, or Muon for matrices and AdamW beside it.

Muon (https://kellerjordan.github.io/posts/muon) makes every step of a matrix equally long in all
directions. PyTorch's own is used, scaled so that a step is about as long as AdamW's with the same
rate; the rates that are best for it were still two to five times as high. `learning_rate` is the
rate of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from headstart.train.options import TrainOptions

_ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
_MUON_MOMENTS = ("momentum_buffer",)
# Of Muon's rate, for AdamW on stacked matrices of experts, which Muon does not take: about how far
# the best rates of the two lay apart for other matrices. Not measured for experts.
STACKED_SHARE = 0.2
# Of the steps after warm-up: the share that is done, and the share that goes down -> of the peak.
_SHAPES: dict[str, Callable[[float, float], float]] = {
    "cosine": lambda done, decay: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done, decay: 1 - done,
    "constant": lambda done, decay: 1.0,
    "wsd": lambda done, decay: min(1.0, (1 - done) / decay),
}
_UPDATES = "updates"  # how often a parameter was changed: 0 for what no depth uses


def learning_rate(step: int, num_steps: int, options: TrainOptions) -> float:
    """For the optimiser's step number `step` (from 0): up linearly, then as the schedule says."""
    peak, warmup = options.learning_rate, options.warmup
    assert peak is not None and warmup is not None
    num_warmup = math.ceil(warmup * num_steps)
    if step < num_warmup:
        return peak * (step + 1) / (num_warmup + 1)
    done = (step - num_warmup) / max(1, num_steps - num_warmup)
    shape = _SHAPES[options.schedule](done, options.decay)
    return peak * (options.final_rate + (1 - options.final_rate) * shape)


class Optimizer:
    """The optimisers of one head, as one."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], options: TrainOptions, *, fused: bool
    ) -> None:
        self._parameters, self._is_fused = parameters, fused
        is_muon = options.optimizer == "muon"
        matrices = {name: p for name, p in parameters.items() if p.dim() > 1}
        vectors = [p for name, p in parameters.items() if name not in matrices]
        self._by_muon = {n for n, p in matrices.items() if is_muon and p.dim() == 2}
        rest = [p for name, p in matrices.items() if name not in self._by_muon]
        self._adamw = _adamw(rest, vectors, options, fused=fused)
        self._adamw.param_groups[0]["share"] = STACKED_SHARE if is_muon else 1.0
        self._muon: torch.optim.Optimizer | None = None
        if self._by_muon:
            self._muon = _muon([p for n, p in matrices.items() if n in self._by_muon], options)

    @property
    def _own(self) -> list[torch.optim.Optimizer]:
        return [self._adamw] if self._muon is None else [self._adamw, self._muon]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """What is kept for every parameter that was changed."""
        return {parameter: kept for own in self._own for parameter, kept in own.state.items()}

    def make_moments(self) -> None:
        """Take the memory that the first step would take; steps are the same with and without."""
        for name, parameter in self._parameters.items():
            if parameter in self.state:
                continue
            kept = self._kept(name)
            if name not in self._by_muon:
                kept["step"] = torch.zeros((), device=self._counts_on(parameter))
            for moment in self._moments(name):
                kept[moment] = torch.zeros_like(parameter)

    def step(self, rate: float) -> None:
        for own in self._own:
            for group in own.param_groups:
                group["lr"] = rate * group.get("share", 1.0)
            own.step()

    def zero_grad(self) -> None:
        for own in self._own:
            own.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Moments by name, whole; every process must ask."""
        result, state = {}, self.state
        for name, parameter in self._parameters.items():
            kept = state.get(parameter, {})
            # A part of the head that no depth uses has never been changed. Muon does not count.
            updates = kept.get("step", 1.0 if kept else 0.0)
            result[f"{_UPDATES}.{name}"] = torch.as_tensor(updates).clone()
            for moment in self._moments(name):
                value = kept.get(moment)
                result[f"{moment}.{name}"] = whole(
                    torch.zeros_like(parameter) if value is None else value
                )
        return result

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `tensors` gave."""
        for name, parameter in self._parameters.items():
            updates = tensors[f"{_UPDATES}.{name}"]
            if updates == 0:
                continue
            kept = self._kept(name)
            if name not in self._by_muon:
                kept["step"] = updates.to(self._counts_on(parameter), copy=True)
            for moment in self._moments(name):
                kept[moment] = like(tensors[f"{moment}.{name}"], parameter).clone()

    def _kept(self, name: str) -> dict[str, Any]:
        """What the optimiser of a parameter keeps for it, to be changed."""
        owner = self._muon if name in self._by_muon else self._adamw
        assert owner is not None
        found: dict[str, Any] = owner.state[self._parameters[name]]
        return found

    def _counts_on(self, parameter: Tensor) -> torch.device:
        """Where AdamW itself counts updates: on the device only for its fused kernel."""
        return parameter.device if self._is_fused else torch.device("cpu")

    def _moments(self, name: str) -> tuple[str, ...]:
        return _MUON_MOMENTS if name in self._by_muon else _ADAM_MOMENTS


def _adamw(
    matrices: list[nn.Parameter], vectors: list[nn.Parameter], options: TrainOptions, *, fused: bool
) -> torch.optim.AdamW:
    assert options.adam_beta2 is not None and options.weight_decay is not None
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},  # norms and biases are not pulled to zero
    ]
    betas = (options.adam_beta1, options.adam_beta2)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=fused)


def _muon(matrices: list[nn.Parameter], options: TrainOptions) -> torch.optim.Optimizer:
    assert options.weight_decay is not None
    return torch.optim.Muon(
        matrices, lr=0.0, weight_decay=options.weight_decay, adjust_lr_fn="match_rms_adamw"
    )


def whole(value: Tensor) -> Tensor:
    """All of a tensor that may be split over processes."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """`value` on the device, in the dtype and with the shards of `parameter`."""
    value = value.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value
