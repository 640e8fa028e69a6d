"""Messages of chats, as clients send them and as chat templates read them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from headstart.errors import RequestError
from headstart.server.protocol.base import NOT_FOR_TEMPLATES, Part


class Message(Part):
    """One message; fields beside these go to the chat template, which may read them or not.

    Clients send back what other servers gave them.
    """

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message for chat templates: parts of text joined, nothing that is null."""
        fields = {name: value for name, value in self.model_dump().items() if value is not None}
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


def for_template(messages: list[Message]) -> list[dict[str, Any]]:
    """All messages of a request; RequestError names the first that cannot be used."""
    ready = []
    for number, message in enumerate(messages):
        try:
            ready.append(message.for_template())
        except RequestError as error:
            error.field = error.field or f"messages[{number}]"
            raise
    return ready


Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=1 << 14)]


def template_options(given: dict[str, Any] | None) -> dict[str, Any]:
    """chat_template_kwargs, without those that clients may not set."""
    taken = [name for name in given or () if name in NOT_FOR_TEMPLATES]
    if taken:
        raise RequestError(
            f"chat_template_kwargs holds {taken[0]}, which is not for the template to know. Leave "
            "it out, or give the field of that name.",
            field="chat_template_kwargs",
        )
    return dict(given or {})
