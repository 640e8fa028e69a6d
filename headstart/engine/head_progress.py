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
    blank: torch.Tensor  # [0, hidden]

    @classmethod
    def start(cls, num_modules: int, like: torch.Tensor) -> HeadProgress:
        """Nothing is filled: module j begins at slot j + 1."""
        blank = like.new_empty(0, like.shape[-1])
        return cls([module + 1 for module in range(num_modules)], [blank] * num_modules, blank)

    @classmethod
    def resume(cls, at: int, boundary: torch.Tensor, *, parallel: bool) -> HeadProgress:
        """Go on after a prefix hit that covers slots [0, at); boundary [modules, hidden]."""
        count, blank = boundary.shape[0], boundary[:0]
        # Module j begins at slot j + 1, which a short hit may not have reached.
        done = [max(at, module + 1) for module in range(count)]
        if parallel:  # module j lacks the states of the last j + 1 trunk slots, oldest first
            states = [boundary[: min(module + 1, at)].flip(0) for module in range(count)]
        else:
            states = [boundary[module : module + (at > module)].clone() for module in range(count)]
        return cls(done, states, blank)

    def feed(self, module: int, new: torch.Tensor) -> None:
        """States for the slots after those already fed."""
        self.states[module] = torch.cat([self.states[module], new])

    def first(self, module: int, count: int) -> torch.Tensor:
        """[count, hidden] states of the module's next slots."""
        own = self.states[module]
        return own if len(own) == count else own[:count]

    def ready(self, module: int, num_tokens: int) -> int:
        """How many slots of the module can be filled: state and token are both known."""
        return max(0, min(len(self.states[module]), num_tokens - self.done[module]))

    def advance(self, module: int, count: int) -> None:
        self.done[module] += count
        own = self.states[module]
        if len(own) == count:
            self.states[module] = self.blank
            return
        rest = own[count:]
        # A slice keeps the whole storage alive: a prompt's states for the sake of one row.
        self.states[module] = rest.clone() if len(rest) <= count else rest
