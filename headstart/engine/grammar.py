"""A request's grammar, held at arm's length: one that fails may end its own request only.

A grammar is somebody else's code: `allowed()` gives the tokens that may come next (bool [V], or
None for all), `accept(token)` moves on and says whether the token fitted, `fork()` copies.
"""

from __future__ import annotations

from typing import Any

import torch


class GuardedGrammar:
    """Passes on what a grammar says; where it fails, nothing is allowed and `error` says why."""

    def __init__(self, grammar: Any, num_tokens: int, error: str | None = None):
        self._grammar, self._num_tokens, self.error = grammar, num_tokens, error

    def allowed(self) -> torch.Tensor | None:
        if self.error is None:
            try:
                mask = self._grammar.allowed()
            except Exception as error:
                self._fail("allowed", error)
            else:
                if mask is None or self._is_mask(mask):
                    return mask  # type: ignore[no-any-return]
                self.error = (
                    f"the grammar's allowed() gave {_shown(mask)}; "
                    f"expected a bool tensor of {self._num_tokens} tokens."
                )
        return torch.zeros(self._num_tokens, dtype=torch.bool)

    def accept(self, token: int) -> bool:
        if self.error is not None:
            return False
        try:
            return bool(self._grammar.accept(token))
        except Exception as error:
            self._fail("accept", error)
            return False

    def fork(self) -> GuardedGrammar:
        copy = None
        if self.error is None:
            try:
                copy = self._grammar.fork()
            except Exception as error:
                self._fail("fork", error)
        return GuardedGrammar(copy, self._num_tokens, self.error)

    def _is_mask(self, mask: Any) -> bool:
        return (
            isinstance(mask, torch.Tensor)
            and mask.dtype == torch.bool
            and mask.shape == (self._num_tokens,)
        )

    def _fail(self, name: str, error: Exception) -> None:
        self.error = f"the grammar's {name}() failed: {type(error).__name__}: {error}"


def _shown(mask: Any) -> str:
    if isinstance(mask, torch.Tensor):
        return f"a tensor of {tuple(mask.shape)} {mask.dtype}"
    return f"a {type(mask).__name__}"
