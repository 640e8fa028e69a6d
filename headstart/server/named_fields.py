"""Which field of a request an error is about: errors are sentences, and clients want a name."""

from __future__ import annotations

import re
from collections.abc import Sequence

_PATH = r"[a-z_]+(?:\[\d+\])?(?:\.[a-z_]+)*"  # as `tools[0]`
_SUBJECT = re.compile(rf"({_PATH})(?: and {_PATH})? (?:is|are|holds|has|names|of t(?:oken|ype)) ")
# Parts of other fields.
_PARTS = {
    "speculate": "headstart.speculate",
    "draft_vocab": "headstart.draft_vocab",
    "choice": "structured_outputs.choice",
}
_GRAMMARS = ("response_format", "structured_outputs", "tools")
# How messages begin that do not begin with a field, and the fields they may be about.
_OTHERS: tuple[tuple[str, Sequence[str]], ...] = (
    (r"no draft vocabulary ", ("headstart.draft_vocab",)),
    (r"speculate |the request asks for speculate ", ("headstart.speculate",)),
    (r"the prompt |.* has no tokenizer|a prompt is ", ("prompt", "messages")),
    (r"the chat template |.* has no chat template", ("messages",)),
    (r"stop strings ", ("stop",)),
    (r"log-probabilities ", ("logprobs",)),
    (r"only end tokens are allowed", ("allowed_token_ids", "min_tokens")),
    (r"the request wants \d+ answers", ("n",)),
    (r"(no text fits )?the (JSON schema|JSON object|regex|grammar|choice) |grammars ", _GRAMMARS),
)


def subject_of(message: str) -> str | None:
    """The field that a message begins with: `top_p is 3; give ...`."""
    found = _SUBJECT.match(message)
    return _PARTS.get(found[1], found[1]) if found else None


def field_of(message: str, given: Sequence[str]) -> str | None:
    """The field that any message is about, of those that the request has."""
    for pattern, fields in _OTHERS:
        if re.match(pattern, message):
            return next((name for name in fields if name.partition(".")[0] in given), None)
    return None
