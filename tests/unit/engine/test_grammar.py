"""What a grammar returns is checked: it may end its own request only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from headstart.engine.grammar import ChainGrammar, GuardedGrammar

VOCAB = 40
ALL = np.full(2, -1, np.int32)


class Chained:
    """Allows tokens 1 and 2, and says so in its own way where a whole chain is asked for."""

    def __init__(self, chain: Any):
        self._chain = chain

    def allowed(self) -> torch.Tensor:
        return torch.tensor([token in (1, 2) for token in range(VOCAB)])

    def accept(self, token: int) -> bool:
        return token in (1, 2)

    def fork(self) -> Chained:
        return self

    def chain_words(self, drafts: Sequence[int]) -> Any:
        return self._chain


@pytest.mark.parametrize(
    "chain", [None, [], 5, [[1, 2]], [ALL] * 4, [ALL[:1]], [ALL.astype(np.int64)]], ids=str
)
def test_an_odd_chain_is_asked_for_one_by_one(chain: Any) -> None:
    grammar = Chained(chain)
    assert isinstance(grammar, ChainGrammar)
    guarded = GuardedGrammar(grammar, VOCAB)
    assert [words.tolist() for words in guarded.words([1, 2]) if words is not None] == [[6, 0]] * 3
    assert guarded.error is None


@pytest.mark.parametrize("chain", [[ALL], [ALL, None, ALL]], ids=["one", "all"])
def test_a_chain_as_it_should_be_is_taken(chain: Any) -> None:
    guarded = GuardedGrammar(Chained(chain), VOCAB)
    assert guarded.words([1, 2]) == chain


class Failing(Chained):
    """Fails at its second token."""

    def __init__(self) -> None:
        super().__init__(None)
        self.num_accepted = 0

    def accept(self, token: int) -> bool:
        self.num_accepted += 1
        if self.num_accepted == 2:
            raise ValueError("broken")
        return True


def test_tokens_are_accepted_up_to_a_failure_or_to_the_end_of_choices() -> None:
    guarded = GuardedGrammar(Failing(), VOCAB)
    assert guarded.accept_all([1, 2, 1]) == 2 and guarded.error is not None
    guarded = GuardedGrammar(Chained(None), VOCAB)
    assert guarded.accept_all([1, -1]) == 1 and guarded.accept_all([2, 1]) == 2
    assert guarded.error is None
