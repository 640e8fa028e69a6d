"""Token ids of prompts in logs of chats, as this server would read them: of `learn run`."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from headstart.data.prompt_reader import PromptReader
from headstart.errors import RequestError
from headstart.server.preparation import names_tools
from headstart.server.protocol.messages import for_template
from headstart.server.protocol.requests import ChatRequest
from headstart.server.tools.calls import prepare
from headstart.server.tools.described import USUAL
from headstart.server.tools.formats import tool_format

# Of a request, what its prompt depends on; the rest may be of another server.
_FIELDS = (
    "messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort",
    "add_generation_prompt", "continue_final_message",
)  # fmt: skip
# What a prompt depends on, too, and this server refuses: such a request is left out.
_REFUSED = (
    "chat_template", "documents", "functions", "enable_thinking", "thinking", "add_special_tokens",
    "truncate_prompt_tokens", "truncation", "verbosity",
)  # fmt: skip


class LoggedPrompts:
    """Reads bodies of chat completions."""

    def __init__(self, reader: PromptReader):
        self._reader = reader
        self._template: str | None = getattr(reader.tokenizer, "chat_template", None)
        # How answers spell calls is not asked here: only what the template is given.
        self._format = tool_format(None, self._template) or USUAL

    def read(self, body: dict[str, Any]) -> list[int]:
        """Token ids of the prompt; RequestError where this server would refuse it."""
        given = {name: body[name] for name in (*_FIELDS, *_REFUSED) if body.get(name) is not None}
        try:
            request = ChatRequest.model_validate(given)
        except ValidationError as error:
            raise RequestError(f"the body is no chat ({error.error_count()} errors).") from None
        messages, options = for_template(request.messages), request.template_options
        if names_tools(request, messages):
            # What is forced is a grammar's matter; prompts differ where there is to be no call.
            is_none = request.tool_choice == "none"
            chat = prepare(
                messages, tools=request.tools, tool_choice="none" if is_none else None,
                format=self._format, chat_template=self._template,
            )  # fmt: skip
            messages, options = chat.messages, {**options, **chat.template_options}
        return self._reader.read(messages, options)
