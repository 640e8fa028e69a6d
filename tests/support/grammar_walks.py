"""What tests of grammars share: a tokenizer of single characters, and walks through grammars."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from headstart.server.grammars.token_grammar import TokenGrammar

CHARS = [chr(i) for i in range(32, 127)] + ["\n", *sorted({*"\uff5c\u2581"})]
SPECIAL = ["<pad>", "<eos>", "<|user|>", "<tool_call>"]
VOCAB = 128  # more than the tokenizer has
END = SPECIAL.index("<eos>")
NEVER = frozenset((0, 2, *range(len(SPECIAL) + len(CHARS), VOCAB)))
MAX_SECONDS = 1.0


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate([*SPECIAL, *CHARS])}
    own = Tokenizer(models.BPE(vocab=words, merges=[]))
    own.decoder = decoders.Fuse()
    own.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<eos>", pad_token="<pad>")


def ids(text: str) -> list[int]:
    return [len(SPECIAL) + CHARS.index(char) for char in text]


def walk(grammar: TokenGrammar, text: str) -> bool:
    """Whether the text fits and may end; every mask on the way agrees with what is accepted."""
    for token in [*ids(text), END]:
        mask = grammar.allowed()
        assert mask is None or (mask.shape, mask.dtype) == ((VOCAB,), torch.bool)
        is_allowed = mask is None or bool(mask[token])
        assert mask is None or not mask[list(NEVER)].any(), "tokens that are no text"
        assert grammar.fork().accept(token) is is_allowed
        if not grammar.accept(token):
            return False
    assert not grammar.allowed().any(), "nothing follows the end"
    return True
