"""Which draft vocabulary may take the running one's place, while requests run."""

from __future__ import annotations

from typing import Any

import pytest

from headstart.engine.draft_vocabs import DraftVocabs
from headstart.errors import ConfigError
from headstart.vocab.draft_vocab import DraftVocab

VOCAB = 64


def vocabs(**facts: Any) -> DraftVocabs:
    return DraftVocabs([DraftVocab.of(range(4), **facts)], vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("first", "why"),
    [(60, None), (61, "it holds token 64, the model has 0 to 63"), (1000, "it holds token 1003")],
)
def test_ids_are_those_of_the_model(first: int, why: str | None) -> None:
    """A device would stop at others, when they are written."""
    new = DraftVocab.of(range(first, first + 4))
    if why is None:
        assert vocabs().replacing(new) == {"default": (60, 61, 62, 63)}
        return
    with pytest.raises(ConfigError, match=f"cannot be swapped in: {why}"):
        vocabs().replacing(new)


@pytest.mark.parametrize("running", [None, "sha256:aa"])
@pytest.mark.parametrize("sent", [None, "sha256:aa", "sha256:bb"])
def test_only_tokenizers_that_are_known_are_held_against_each_other(
    running: str | None, sent: str | None
) -> None:
    why = vocabs(tokenizer_sha=running).why_not(DraftVocab.of(range(4), tokenizer_sha=sent))
    assert (why is None) is (None in (running, sent) or running == sent)
