"""Hashes that say whether two things are the same: tokenizers, chat templates, prompts.

Files are hashed by what they mean, not byte by byte: tools that save a tokenizer again change its
white space and its padding, and both leave every token where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from headstart.checkpoint.config import read_json_object
from headstart.checkpoint.reader import Checkpoint
from headstart.data.conversations import Message
from headstart.errors import BadConfig
from headstart.files import read_text

ABSENT = "absent"


def tokenizer_sha(checkpoint: Checkpoint) -> str:
    """Of tokenizer.json, without padding and truncation; `absent` where there is none."""
    made = checkpoint.tokenizer_documents().get("tokenizer.json")
    path = checkpoint.folder / "tokenizer.json"
    if made is None and not path.is_file():
        return ABSENT
    document = read_json_object(path) if made is None else json.loads(made)
    return _sha({k: v for k, v in document.items() if k not in ("padding", "truncation")})


def template_sha(checkpoint: Checkpoint) -> str:
    """Of the chat template: chat_template.jinja, else the one inside tokenizer_config.json."""
    made = checkpoint.tokenizer_documents()
    if made:
        template = made.get("chat_template.jinja")
        return _sha(template) if template else ABSENT
    path = checkpoint.folder / "chat_template.jinja"
    if path.is_file():
        return _sha(_text(path))
    path = checkpoint.folder / "tokenizer_config.json"
    template = read_json_object(path).get("chat_template") if path.is_file() else None
    return _sha(template) if template else ABSENT


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise BadConfig(f"{path} cannot be read ({error}). Download it again.") from error


def prompt_sha(messages: Sequence[Message]) -> str:
    """Of what is asked: every message that is not an answer."""
    asked = [[m["role"], m["content"]] for m in messages if m["role"] != "assistant"]
    return _sha(asked)


def is_heldout(sha: str, share: float) -> bool:
    """Whether a prompt belongs to the held-out part.

    By its hash alone, so that it stays where it is when prompts are added, and all its turns and
    samples stay together.
    """
    return int(sha[:16], 16) < share * 2**64


def _sha(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", errors="backslashreplace")).hexdigest()
