"""How far a head has read one request, module by module."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class HeadProgress:
    """Which slots are filled, and what feeds the next ones.

    `done[j]` is the next slot of module j; `states[j][r]` feeds slot done[j] + r. A trunk state of
    slot t feeds slot t + 1 of module 0, and in a parallel head slot t + j + 1 of every module; in
    a chained head the output of module j at slot i feeds slot i + 1 of module j + 1. Only states
    of accepted tokens ever get here.
    """

    done: list[int]
    states: list[torch.Tensor]  # [n, hidden] each

    @classmethod
    def start(cls, num_modules: int, like: torch.Tensor) -> HeadProgress:
        """Nothing is filled: module j begins at slot j + 1."""
        return cls(
            [module + 1 for module in range(num_modules)],
            [like.new_empty(0, like.shape[-1]) for _ in range(num_modules)],
        )

    @classmethod
    def resume(cls, at: int, boundary: torch.Tensor, *, parallel: bool) -> HeadProgress:
        """Go on after a prefix hit that covers slots [0, at); boundary [modules, hidden]."""
        count = boundary.shape[0]
        # Module j begins at slot j + 1, which a short hit may not have reached.
        done = [max(at, module + 1) for module in range(count)]
        if parallel:  # module j lacks the states of the last j + 1 trunk slots, oldest first
            return cls(done, [boundary[: min(module + 1, at)].flip(0) for module in range(count)])
        return cls(
            done, [boundary[module : module + (at > module)].clone() for module in range(count)]
        )

    def feed(self, module: int, new: torch.Tensor) -> None:
        """States for the slots after those already fed."""
        self.states[module] = torch.cat([self.states[module], new])

    def ready(self, module: int, num_tokens: int) -> int:
        """How many slots of the module can be filled: state and token are both known."""
        return max(0, min(len(self.states[module]), num_tokens - self.done[module]))

    def advance(self, module: int, count: int) -> None:
        self.done[module] += count
        rest = self.states[module][count:]
        # A slice keeps the whole storage alive: a prompt's states for the sake of one row.
        self.states[module] = rest.clone() if len(rest) <= count else rest
