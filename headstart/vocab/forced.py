"""Tokens that every draft vocabulary must have, whatever the counts say.

Counts miss what is rare and certain: the end of a turn, a tool call, a byte of an emoji. Without
them a head cannot propose the one token that comes next, and answers end in rejected drafts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from headstart.errors import DataError

# Written by models around thoughts and tool calls; where they are no tokens of their own, their
# pieces are forced.
MARKERS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip
_BYTE_FALLBACK = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_CONVERSATIONS = (
    ("system", "user", "assistant"),
    ("user", "assistant"),
    ("user",),
)


def forced_ids(tokenizer: Any, end_ids: Iterable[int] = ()) -> frozenset[int]:
    """Special and added tokens, ends, what the chat template writes, digits, whitespace, bytes.

    `tokenizer` is a fast tokenizer of transformers.
    """
    found = {*end_ids, *tokenizer.all_special_ids}
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    found |= {token["id"] for token in document.get("added_tokens") or ()}
    found |= {token for token, text in token_texts(document).items() if _is_basic(text)}
    for marker in MARKERS:
        found |= set(tokenizer.encode(marker, add_special_tokens=False))
    return frozenset(found | template_ids(tokenizer))


def template_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that the chat template puts around messages."""
    if not getattr(tokenizer, "chat_template", None):
        return frozenset()
    reason: Exception | None = None
    for roles in _CONVERSATIONS:  # some templates refuse a system message
        messages = [{"role": role, "content": ""} for role in roles]
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=roles[-1] == "user"
            )
        except Exception as error:  # a checkpoint's template may raise anything
            reason = error
            continue
        start = tokenizer.apply_chat_template(
            [{"role": "user", "content": ""}], tokenize=False, add_generation_prompt=True
        )
        return frozenset(tokenizer.encode(text + start, add_special_tokens=False))
    raise DataError(
        f"the chat template cannot be rendered, even for one user message ({reason}); repair it, "
        f"or remove it if the model is none for chats."
    )


def token_texts(document: dict[str, Any]) -> dict[int, bytes]:
    """What each token of a tokenizer.json stands for, as far as it stands for itself."""
    model = document["model"]
    vocab = model["vocab"]
    named = vocab.items() if isinstance(vocab, dict) else ((t[0], i) for i, t in enumerate(vocab))
    unmapped = _byte_of_character() if _is_byte_level(document) else None
    return {token: _text(name, unmapped) for name, token in named}


def _text(name: str, unmapped: dict[str, int] | None) -> bytes:
    if unmapped is not None and all(character in unmapped for character in name):
        return bytes(unmapped[character] for character in name)
    if _BYTE_FALLBACK.fullmatch(name):
        return bytes([int(name[3:5], 16)])
    return name.replace("\u2581", " ").encode()  # SentencePiece's sign for a space


def _is_basic(text: bytes) -> bool:
    """A byte, a digit with or without a space before it, or whitespace."""
    return (
        len(text) == 1 or text.isspace() or (len(text) == 2 and text[:1] == b" " and _digit(text))
    )


def _digit(text: bytes) -> bool:
    return text[1:].isdigit()


def _is_byte_level(document: dict[str, Any]) -> bool:
    """Whether token names are bytes in disguise; the parts may lie inside sequences."""
    parts = [document.get("pre_tokenizer"), document.get("decoder")]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if part.get("type") == "ByteLevel":
                return True
            parts += [*part.get("pretokenizers", ()), *part.get("decoders", ())]
    return False


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes visible Latin-1 bytes as themselves and the others from U+0100 up."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {
        **{chr(byte): byte for byte in visible},
        **{chr(256 + place): byte for place, byte in enumerate(hidden)},
    }
