"""Single tokens: which are special, and each as bytes, of which one may have half a character."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

from headstart.errors import library_fault

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that decoding skips where special tokens are to be left out.

    A tokenizer.json may mark tokens as special that no list of special tokens names.
    """
    added = tokenizer.added_tokens_decoder.items()
    return frozenset({*tokenizer.all_special_ids, *(i for i, token in added if token.special)})


class Piece(NamedTuple):
    """One token, in all ways in which answers show it."""

    data: bytes
    numbers: list[int]  # the same, for JSON
    text: str  # bytes that are no character show as a replacement mark
    spelled: str  # the text, or its bytes as numbers where they are no text, as OpenAI writes them
    is_whole: bool  # whether its bytes are whole characters
    is_special: bool = False

    @classmethod
    def of(cls, data: bytes, *, is_special: bool = False) -> Piece:
        text = data.decode("utf-8", "replace")
        is_whole = text.encode() == data
        spelled = text if is_whole else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return cls(data, list(data), text, spelled, is_whole, is_special)


class Pieces:
    """The tokens of one tokenizer, by id."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        kind = str(tokenizer.backend_tokenizer.decoder)
        self._is_byte_level = "ByteLevel" in kind
        self._has_byte_pieces = "ByteFallback" in kind
        self._special = special_ids(tokenizer)
        self.of = lru_cache(maxsize=1 << 16)(self._piece)  # most are asked for again and again

    def _piece(self, token: int) -> Piece:
        return Piece.of(self._bytes(token), is_special=token in self._special)

    def bytes_of(self, token: int) -> bytes:
        return self.of(token).data

    def text_of(self, token: int) -> str:
        """A token as text; bytes that are no character show as a replacement mark."""
        return self.of(token).text

    def is_special(self, token: int) -> bool:
        return token in self._special

    def bytes_at_start(self, token: int) -> bytes:
        """Bytes of a text's first token: some tokenizers drop the space before a text."""
        data = self.bytes_of(token)
        if data.startswith(b" ") and not self._decoded(token, " ").startswith(" "):
            return data[1:]
        return data

    def _bytes(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if self._is_byte_level and token not in self._special:
            table = _byte_table()
            if all(character in table for character in piece):
                return bytes(table[character] for character in piece)
        if self._has_byte_pieces:
            if found := _BYTE_PIECE.fullmatch(piece):
                return bytes([int(found[1], 16)])
            return str(piece).replace("\u2581", " ").encode()
        return self._decoded(token, str(piece)).encode()

    def _decoded(self, token: int, default: str) -> str:
        """A token alone; the default where the tokenizer fails with it."""
        try:
            return str(self._tokenizer.decode([token]))
        except BaseException as error:
            if library_fault(error) is None:
                raise
            return default


@lru_cache(maxsize=1)
def _byte_table() -> dict[str, int]:
    """Byte-level tokenizers write bytes as characters: printable ones as themselves, others moved
    behind the first 256 code points, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(256 + at): byte for at, byte in enumerate(others)}
