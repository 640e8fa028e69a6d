"""Forced tokens are present: specials, ends, chat markers, digits, whitespace, bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headstart.errors import DataError
from headstart.vocab.forced import forced_ids, template_ids, token_texts

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = ["the user and the assistant wrote 1234 words\n\n    in 2 files 你好 " * 20]


def byte_level(template: str | None = None) -> Any:
    """A byte-level BPE as Qwen's: bytes in disguise, markers that are not special."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXT, trainer)
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<think>"), AddedToken("</think>"), AddedToken("<box>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def test_maps_hold_the_forced_specials() -> None:
    tokenizer = byte_level(TEMPLATE)
    forced = forced_ids(tokenizer, [3])
    for text in ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<box>"):
        assert tokenizer.convert_tokens_to_ids(text) in forced, text
    assert 3 in forced
    for piece in ("0", "7", "\n", " ", "\t", "user", "assistant", "\n\n", "    "):
        assert set(tokenizer.encode(piece, add_special_tokens=False)) <= forced, repr(piece)


def test_any_text_can_be_drafted_byte_by_byte() -> None:
    """All 256 bytes are in, those that byte-level BPE writes under another sign included."""
    tokenizer = byte_level()
    texts = token_texts(json.loads(tokenizer.backend_tokenizer.to_str()))
    forced = forced_ids(tokenizer)
    assert {texts[token] for token in forced if len(texts.get(token, b"")) == 1} == {
        bytes([value]) for value in range(256)
    }
    assert len(forced) < len(tokenizer), "the control: not everything is forced"
    assert texts[tokenizer.encode(" the")[0]] == b" the"


def test_byte_fallbacks_and_spaces_of_sentencepiece_are_known() -> None:
    names = ["<unk>", "<0x0A>", "<0xFF>", "\u2581", "\u2581\u2581", "\u25817", "12", "\u2581word"]
    document = {"model": {"type": "Unigram", "vocab": [[name, 0.0] for name in names]}}
    texts = token_texts(document)
    assert texts[1] == b"\n" and texts[2] == b"\xff"
    assert texts[4] == b"  " and texts[7] == b" word"


def test_a_template_that_refuses_system_messages_still_gives_its_tokens() -> None:
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer = byte_level(refusing + TEMPLATE)
    found = template_ids(tokenizer)
    assert {tokenizer.convert_tokens_to_ids(t) for t in ("<|im_start|>", "<|im_end|>")} <= found


def test_a_template_that_cannot_be_rendered_is_an_error() -> None:
    with pytest.raises(DataError, match="cannot be rendered"):
        template_ids(byte_level("{{ raise_exception('never') }}"))
    assert template_ids(byte_level()) == frozenset()
