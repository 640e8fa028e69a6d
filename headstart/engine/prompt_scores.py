"""Log-probabilities of a prompt's own tokens, where a request asks for them.

They are made of the trunk's states while the prompt is read, a few rows at a time, so that no
prompt needs memory for all of its logits. They are on their way to the host while other requests
go on, and are read when the first token is handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from headstart.backends.base import Backend, RowScores
from headstart.sampling.choose import TokenLogprob

_ROWS = 64  # whose logits are in memory at a time


@dataclass
class PromptScores:
    """Row i of a prompt gives the log-probability of token i + 1; nothing gives that of token 0."""

    prompt_ids: Sequence[int]
    top: int  # alternatives
    num_rows: int = 0  # that are done; they stay when a request starts again
    _parts: list[tuple[int, RowScores]] = field(default_factory=list)  # by first token
    _entries: list[TokenLogprob] = field(default_factory=list)  # of parts that are on the host

    @property
    def is_done(self) -> bool:
        return self.num_rows >= len(self.prompt_ids) - 1

    def read(self, backend: Backend, start: int, states: Tensor) -> None:
        """Take rows of a pass, of which `start` was the first; those that are done are left out."""
        end = min(start + len(states), len(self.prompt_ids) - 1)
        assert start <= self.num_rows, "a prefix hit hides rows"
        while self.num_rows < end:
            begin, stop = self.num_rows, min(self.num_rows + _ROWS, end)
            tokens = self.prompt_ids[begin + 1 : stop + 1]
            found = backend.score(states[begin - start : stop - start], tokens, self.top)
            self._parts.append((begin + 1, found))
            self.num_rows = stop

    def entries(self) -> list[TokenLogprob]:
        """Of the prompt's tokens from the second on, as far as they were read; made once."""
        for first, scores in self._parts:
            self._entries += scores.of(self.prompt_ids[first : first + len(scores.values)])
        self._parts.clear()
        return self._entries
