"""Answers out of thin air, for tests of what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headstart.data.fingerprints import prompt_sha
from headstart.data.journal import Answer


def made(prompt: str, ids: Sequence[int], **fields: Any) -> Answer:
    """An answer to `prompt` whose text follows from its ids."""
    words = " ".join(f"word{i}" for i in ids)
    given: dict[str, Any] = {
        "prompt_id": prompt, "category": "general", "turn": 0, "sample": 0,
        "prompt_sha": prompt_sha([{"role": "user", "content": prompt}]), "user": prompt,
        "text": words, "prompt_ids": [1, 2], "answer_ids": list(ids), "finish_reason": "stop",
        "seed": 0, "exact_ids": True, **fields,
    }  # fmt: skip
    return Answer(**given)
