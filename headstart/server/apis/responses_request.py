"""POST /v1/responses: its body, and the chat that it asks for.

What needs answers to be kept (`previous_response_id`, `conversation`, `background`) is refused: a
client sends the whole conversation, as the SDKs do with `store: false`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from headstart.errors import RequestError
from headstart.server.protocol.base import NEUTRAL, Part, Whole
from headstart.server.protocol.messages import Tools
from headstart.server.protocol.requests import ChatRequest, SamplerFields

LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # the second: nothing here is encrypted
_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


class TextFields(Part):
    format: dict[str, Any] | None = Field(
        default=None, description="text, json_object or json_schema"
    )
    verbosity: str | None = Field(default=None, description="medium: nothing is added to prompts")


class ReasoningFields(Part):
    effort: str | None = Field(default=None, description="for the chat template")
    summary: str | None = Field(default=None, description="the reasoning itself is given")


class ResponsesRequest(SamplerFields):
    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=1 << 14)]
    instructions: str | None = None
    max_output_tokens: Whole | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextFields = TextFields()
    reasoning: ReasoningFields = ReasoningFields()
    include: list[str] | None = Field(
        default=None, description=f"up to now: {', '.join(_INCLUDED)}"
    )
    top_logprobs: Whole | None = None
    stream_options: dict[str, Any] | None = Field(
        default=None, description="accepted and without effect"
    )
    chat_template_kwargs: dict[str, Any] | None = None

    names: ClassVar[dict[str, str]] = {  # of the chat's fields, where they are called otherwise
        "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format",
        "reasoning_effort": "reasoning.effort", "logprobs": "include",
    }  # fmt: skip

    def as_chat(self) -> ChatRequest:
        """The same for the chat API; RequestError names what cannot be had."""
        unknown = [name for name in self.include or () if name not in _INCLUDED]
        if unknown:
            raise RequestError(
                f"include holds {unknown[0][:60]!r}; this server knows {', '.join(_INCLUDED)}.",
                field="include",
            )
        verbosity = self.text.verbosity
        if verbosity is not None and verbosity not in NEUTRAL["verbosity"]:
            raise RequestError(
                f"text.verbosity is {verbosity[:40]!r}; this server adds nothing to "
                "prompts. Say in instructions how long answers should be.",
                field="text.verbosity",
            )
        given: dict[str, Any] = {
            "messages": self._messages(), "max_tokens": self.max_output_tokens,
            "tools": None if self.tools is None else [
                _tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)
            ],
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _format(self.text.format),
            "reasoning_effort": self.reasoning.effort,
            "logprobs": True if LOGPROBS in (self.include or ()) or self.top_logprobs else None,
            "top_logprobs": self.top_logprobs or None,
            "chat_template_kwargs": self.chat_template_kwargs,
        }  # fmt: skip
        return chat_of(self, given)

    def _messages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if self.instructions:
            found.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}]
        for number, item in enumerate(self.input):
            _add_item(found, item, f"input[{number}]")
        return found


def chat_of(request: SamplerFields, fields: Mapping[str, Any]) -> ChatRequest:
    """A chat with these fields, and with what requests of every API may hold."""
    shared = {
        name: getattr(request, name)
        for name in SamplerFields.model_fields
        if name in request.model_fields_set
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return ChatRequest.model_validate({**shared, **given})


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message" and isinstance(item.get("role"), str):
        message = {"role": item["role"], "content": _text(item.get("content"), where)}
        before = messages[-1] if messages else {}
        if item["role"] == "assistant" and before.keys() == {"role", "reasoning_content"}:
            messages[-1] = {**before, **message}
        else:
            messages.append(message)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        said = _text(item.get("output"), where)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": said})
    elif kind == "reasoning":
        thought = _text(item.get("content") or item.get("summary"), where)
        if thought:
            messages.append({"role": "assistant", "reasoning_content": thought})
    else:
        raise RequestError(
            f"{where} has the type {str(kind)[:40]!r}; this server reads messages, function_call, "
            "function_call_output and reasoning.",
            field=where,
        )


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end: calls that follow a text belong to it."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts: Sequence[Any] = content if isinstance(content, list) else [content]
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in _TEXTS:
            raise RequestError(
                f"{where} holds a part of type {str(kind)[:40]!r}; this server reads text: "
                '{"type": "input_text", "text": ...}.',
                field=where,
            )
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in parts)


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function" or "function" in tool:
        raise RequestError(
            f"{where} has the type {str(tool.get('type'))[:40]!r}; this server knows tools of the "
            'client: {"type": "function", "name": ..., "parameters": ...}.',
            field=where,
        )
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise RequestError(
            f"tool_choice has the type {str(choice.get('type'))[:40]!r}; give none, auto, required "
            'or {"type": "function", "name": ...}.',
            field="tool_choice",
        )
    return {"type": "function", "function": {"name": choice.get("name")}}


def _format(format: dict[str, Any] | None) -> dict[str, Any] | None:
    if format is None or format.get("type") != "json_schema":
        return format
    schema = {name: value for name, value in format.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": schema}
