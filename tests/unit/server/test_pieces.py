"""Single tokens as bytes, for tokenizers of several kinds."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headstart.server.pieces import Pieces


def test_tokens_are_bytes_also_where_they_are_half_a_character() -> None:
    words = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    pieces = Pieces(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"))
    ids = backend.encode(" \u20ac\x00").ids
    assert b"".join(pieces.bytes_of(token) for token in ids) == " \u20ac\x00".encode()
    assert pieces.text_of(ids[1]) == "\ufffd" and pieces.text_of(0) == "<end>"


def test_byte_pieces_and_blanks_of_sentencepiece_are_read() -> None:
    backend = Tokenizer(models.WordLevel({"<0xE2>": 0, "\u2581on": 1, "x": 2}, unk_token="x"))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    pieces = Pieces(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert [pieces.bytes_of(token) for token in (0, 1, 2)] == [b"\xe2", b" on", b"x"]
