"""The body of POST /v1/chat/completions."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from headstart.errors import RequestError
from headstart.server.options import ServerOptions
from headstart.server.protocol.base import Part, Whole
from headstart.server.protocol.sampling import SamplingFields

# Fields of messages that OpenAI's clients send; a template that has no use for them has none.
_MESSAGE_FIELDS = frozenset(("name", "tool_calls", "tool_call_id", "reasoning_content", "refusal"))


class Message(Part):
    """One message; fields that only the chat template knows are passed on to it."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None

    def for_template(self, template: str | None) -> dict[str, Any]:
        """As templates expect it: parts of text joined, nothing that is null."""
        fields = {name: value for name, value in self.model_dump().items() if value is not None}
        for name in fields.keys() - type(self).model_fields.keys() - _MESSAGE_FIELDS:
            if not re.search(rf"\b{re.escape(name)}\b", template or ""):
                raise RequestError(
                    f"messages holds the field {name[:80]!r}, which the model's chat template does "
                    "not read. Leave it out."
                )
        fields["role"] = "system" if self.role == "developer" else self.role
        fields["content"] = _text(self.content)
        return fields


def _text(content: str | list[dict[str, Any]] | None) -> str:
    if not isinstance(content, list):
        return content or ""
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"messages holds a part of type {str(part.get('type'))[:40]!r}; this server reads "
                'text: {"type": "text", "text": ...}.'
            )
    return "".join(part["text"] for part in content)


def for_template(messages: list[Message], template: str | None) -> list[dict[str, Any]]:
    """All messages of a request; RequestError names the first that cannot be used."""
    ready = []
    for number, message in enumerate(messages):
        try:
            ready.append(message.for_template(template))
        except RequestError as error:
            error.field = error.field or f"messages[{number}]"
            raise
    return ready


Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=1 << 14)]
# Arguments of the template engine rather than of the template: a client must not bring its own
# template (a program that runs here), nor cut what the model reads.
_NOT_FOR_CLIENTS = (
    "chat_template", "continue_final_message", "max_length", "messages", "padding",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "tools", "truncation",
)  # fmt: skip


def template_options(given: dict[str, Any] | None) -> dict[str, Any]:
    """What a client may tell the chat template."""
    taken = [name for name in given or () if name in _NOT_FOR_CLIENTS]
    if taken:
        raise RequestError(
            f"chat_template_kwargs holds {taken[0]}, which is not for the template to know. Leave "
            "it out, or give the field of that name.",
            field="chat_template_kwargs",
        )
    return dict(given or {})


class ChatRequest(SamplingFields):
    messages: Messages
    max_completion_tokens: Whole | None = None
    logprobs: bool = False
    top_logprobs: Whole | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def own_names(self) -> dict[str, str]:
        return {
            **super().own_names,
            "prompt": "messages",
            "max_tokens": self.max_tokens_field,
            "logprobs": self.logprobs_field,
        }

    @property
    def logprobs_field(self) -> str:
        return "top_logprobs" if self.top_logprobs is not None else "logprobs"

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_tokens is not None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self, limits: ServerOptions) -> None:
        super().check(limits)
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError(
                "top_logprobs is given without logprobs; set logprobs to true.",
                field="top_logprobs",
            )
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise RequestError(
                f"max_tokens is {both[0]} and max_completion_tokens {both[1]}; give one of them.",
                field="max_tokens",
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message is given with add_generation_prompt; set the second to "
                "false.",
                field="continue_final_message",
            )

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    @property
    def template_options(self) -> dict[str, Any]:
        own: dict[str, Any] = {"add_generation_prompt": self.add_generation_prompt}
        if self.continue_final_message:
            own["continue_final_message"] = True
        return {**own, **template_options(self.chat_template_kwargs)}
