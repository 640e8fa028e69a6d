"""The bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Any

from headstart.server.protocol.base import Part, TokenIds
from headstart.server.protocol.chat import Messages, Tools, template_options


class TokenizeRequest(Part):
    """A text, or messages that go through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    return_token_strs: bool = False

    @property
    def template_options(self) -> dict[str, Any]:
        return {
            "add_generation_prompt": self.add_generation_prompt,
            **template_options(self.chat_template_kwargs),
        }


class DetokenizeRequest(Part):
    model: str | None = None
    tokens: TokenIds
