"""The tokenizer of made checkpoints: the words t2, t3, ... are the tokens 2, 3, ...

Any other word is read as token 0.
"""

from __future__ import annotations

import json
from typing import Any

# What is said, with spaces between; no roles, which would be unknown words.
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def tokenizer_documents(config: dict[str, Any]) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json for the vocabulary of `config`."""
    text = config.get("text_config", config)
    # Special tokens are cut out of a text wherever they stand: t1 would break t10 apart.
    words = ["<s>", "</s>", *(f"t{i}" for i in range(2, text["vocab_size"]))]
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: i for i, word in enumerate(words)},
            "unk_token": words[0],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": text.get("max_position_embeddings", 1024),
        "eos_token": words[text.get("eos_token_id", 1)],
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": json.dumps(tokenizer),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }
