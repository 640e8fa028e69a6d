"""POST /v1/messages, as Anthropic's clients send it: its body, and the chat that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from headstart.errors import RequestError
from headstart.server.apis.responses_request import chat_of
from headstart.server.protocol.base import Part, Texts, Whole
from headstart.server.protocol.requests import ChatRequest, SamplerFields

_Blocks = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=1 << 14)]
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class AnthropicMessage(Part):
    role: Literal["user", "assistant", "system"]
    content: str | _Blocks


class AnthropicTool(Part):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = Field(
        default=None, description="equal prefixes are always cached"
    )
    eager_input_streaming: bool | None = Field(
        default=None, description="accepted and without effect"
    )


class Thinking(Part):
    """Whether the model thinks, for chat templates that read `enable_thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Whole | None = Field(
        default=None, description="not enforced: max_tokens bounds thinking and text together"
    )
    display: str | None = Field(default=None, description="thinking is always shown")


class MessageFields(SamplerFields):
    """What asking and counting have in common."""

    messages: Annotated[list[AnthropicMessage], Field(fail_fast=True, min_length=1)]
    system: str | _Blocks | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = Field(
        default=None, description="equal prefixes are always cached"
    )

    names: ClassVar[dict[str, str]] = {
        "response_format": "output_config.format",
        "stop": "stop_sequences",
    }

    def chat_fields(self) -> dict[str, Any]:
        found = [{"role": "system", "content": _text(self.system, "system")}] if self.system else []
        for number, message in enumerate(self.messages):
            found += _messages(message, f"messages[{number}]")
        options = dict(self.chat_template_kwargs or {})
        if self.thinking is not None and self.thinking.type != "adaptive":
            options["enable_thinking"] = self.thinking.type == "enabled"
        choice, is_parallel = _choice(self.tool_choice)
        return {
            "messages": found,
            "tools": None if self.tools is None else [_tool(tool) for tool in self.tools],
            "tool_choice": choice, "parallel_tool_calls": is_parallel,
            "chat_template_kwargs": options or None,
        }  # fmt: skip

    def as_chat(self) -> ChatRequest:
        return chat_of(self, self.chat_fields())


class MessagesRequest(MessageFields):
    max_tokens: Whole
    stop_sequences: Texts | None = None
    output_config: dict[str, Any] | None = Field(
        default=None, description="format (a JSON schema) and effort"
    )
    output_format: dict[str, Any] | None = Field(default=None, description="a JSON schema")

    def as_chat(self) -> ChatRequest:
        config = dict(self.output_config or {})
        form: Any = config.pop("format", self.output_format)
        effort = config.pop("effort", None)
        if config:
            name = f"output_config.{next(iter(config))[:60]}"
            raise RequestError(f"the field {name!r} is not known. Leave it out.", field=name)
        return chat_of(
            self,
            {
                **self.chat_fields(), "max_tokens": self.max_tokens, "stop": self.stop_sequences,
                "response_format": None if form is None else _format(form),
                "reasoning_effort": effort,
            },
        )  # fmt: skip


class CountTokensRequest(MessageFields):
    """POST /v1/messages/count_tokens."""


def _format(form: Any) -> dict[str, Any]:
    own = form if isinstance(form, Mapping) else {}
    if own.get("type") != "json_schema" or not isinstance(own.get("schema"), Mapping):
        raise RequestError(
            'output_config.format is not {"type": "json_schema", "schema": ...}.',
            field="output_config.format",
        )
    named = {"name": "answer", "schema": own["schema"], "strict": True}
    return {"type": "json_schema", "json_schema": named}


def _messages(message: AnthropicMessage, where: str) -> list[dict[str, Any]]:
    """A message as the chat API has it: results of tools are messages of their own, and first."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, calls, texts, thoughts = [], [], [], []
    for block in message.content:
        kind = block.get("type")
        if kind == "text":
            texts.append(str(block.get("text") or ""))
        elif kind == "tool_result":
            said = _result(block, where)
            results.append(
                {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said}
            )
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            raise _unreadable(kind, where)
    own: dict[str, Any] = {"role": message.role, "content": "".join(texts)}
    if thoughts:
        own["reasoning_content"] = "".join(thoughts)
    if calls:
        own["tool_calls"] = calls
    return [*results, own] if texts or calls or thoughts or not results else results


def _result(block: Mapping[str, Any], where: str) -> str:
    """What a tool said; templates have no place for errors, so that the text says so."""
    is_error = block.get("is_error")
    if is_error is not None and not isinstance(is_error, bool):
        raise _not("is_error", is_error, where, "true or false")
    said = _text(block.get("content"), f"{where}.tool_result.content")
    return f"Error: {said}" if is_error else said


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(
            f"{where} is {str(content)[:40]!r}; give text, or a list of blocks.", field=where
        )
    for block in content:
        if not isinstance(block, Mapping) or block.get("type") != "text":
            raise _unreadable(block.get("type") if isinstance(block, Mapping) else block, where)
    return "".join(str(block.get("text") or "") for block in content)


def _not(name: str, found: Any, where: str, expected: str) -> RequestError:
    field = f"{where}.{name}"
    return RequestError(f"{field} is {str(found)[:40]!r}; give {expected}.", field=field)


def _unreadable(kind: Any, where: str) -> RequestError:
    return RequestError(
        f"{where} holds a block of type {str(kind)[:40]!r}; this server reads text, tool_use, "
        "tool_result and thinking.",
        field=where,
    )


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """The chat's tool_choice and parallel_tool_calls."""
    if choice is None:
        return None, None
    kind, is_one = choice.get("type"), choice.get("disable_parallel_tool_use")
    known = ("type", "disable_parallel_tool_use", *(["name"] if kind == "tool" else []))
    if unknown := [name for name in choice if name not in known]:
        field = f"tool_choice.{unknown[0][:60]}"
        raise RequestError(f"the field {field!r} is not known. Leave it out.", field=field)
    if is_one is not None and not isinstance(is_one, bool):
        raise _not("disable_parallel_tool_use", is_one, "tool_choice", "true or false")
    is_parallel = None if is_one is None else not is_one
    if kind == "tool":
        name = choice.get("name")
        if not isinstance(name, str):
            raise _not("name", name, "tool_choice", "the name of a tool")
        return {"type": "function", "function": {"name": name}}, is_parallel
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise RequestError(
            f"tool_choice has the type {str(kind)[:40]!r}; give auto, any, none or tool with a "
            "name.",
            field="tool_choice",
        )
    return _CHOICES[kind], is_parallel
