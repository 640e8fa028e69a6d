"""Tools of a chat request: checked, put into what the chat template gets, and forced if asked.

`tool_choice` none leaves the tools out. auto lets the model decide and reads what it wrote; tools
with `strict` are then held to their schema by a grammar once a call begins. required and a named
tool are forced by a grammar from the first token on, so that the answer always parses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.errors import RequestError, some
from headstart.server.grammar_specs import Format, GrammarSpec, schema_format
from headstart.server.named_fields import about
from headstart.server.schema_rules import check_form, enforceable
from headstart.server.tool_arguments import is_object_schema
from headstart.server.tool_formats import ToolFormat
from headstart.server.tool_parsing import ToolParser

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Keywords that say what a value may be; a schema without any is that of an object's properties.
_SHAPES = frozenset(("type", "$ref", "const", "enum", "anyOf", "oneOf", "allOf"))


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: Mapping[str, Any]
    is_strict: bool
    shown: dict[str, Any]  # what the chat template gets
    field: str  # where the request has it

    def schema(self) -> Any:
        """Its arguments as a grammar can enforce them; strict tools must be enforced whole."""
        with about(f"{self.field}.function.parameters"):
            return self._enforceable()

    def _enforceable(self) -> Any:
        found = enforceable(dict(self.parameters), relaxed=not self.is_strict)
        if not _SHAPES & found.keys():
            found = {"type": "object", **found}
        if not is_object_schema(found, found):
            raise RequestError(
                f"the parameters of the tool {self.name!r} allow something else than a JSON "
                'object, and arguments are one. Give a schema of "type": "object".'
            )
        return found


@dataclass(frozen=True)
class PreparedChat:
    """What the rest of the server needs to know of a request's tools."""

    messages: list[dict[str, Any]]
    template_options: dict[str, Any] = field(default_factory=dict)
    grammar: GrammarSpec | None = None
    format: ToolFormat | None = None  # None: the answer is content
    tools: tuple[Tool, ...] = ()
    max_calls: int | None = None
    is_forced: bool = False  # calls come out of a grammar, so they are well formed

    @property
    def uses_tools(self) -> bool:
        """Then special tokens must stay in the text: a format's markers may be among them."""
        return self.format is not None

    def new_parser(self) -> ToolParser:
        """For one answer."""
        schemas = {tool.name: tool.parameters for tool in self.tools}
        return ToolParser(self.format, schemas, max_calls=self.max_calls, is_forced=self.is_forced)


def prepare(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    tool_choice: Any = None,
    parallel_tool_calls: bool | None = None,
    format: ToolFormat | None = None,
    chat_template: str | None = None,
    spec: GrammarSpec | None = None,
) -> PreparedChat:
    """`spec` is what the answer must look like where it is not a call."""
    ready = []
    for number, message in enumerate(messages):
        with about(f"messages[{number}]"):
            ready.append(_message(message, format))
    with about("tools"):
        known = read_tools(tools or ())
    with about("tool_choice"):
        choice = _choice(tool_choice, known)
    if not known or choice == "none":
        return PreparedChat(ready, grammar=spec)
    if "tools" not in (chat_template or ""):
        raise RequestError(
            "tools is given and the model's chat template has no place for tools. Leave tools out, "
            "or serve a model that was trained to use them.",
            field="tools",
        )
    if format is None:
        raise RequestError(
            "tools is given and the format of this model's tool calls is not known. Start the "
            "server with --tool-call-parser.",
            field="tools",
        )
    is_one = parallel_tool_calls is False or choice not in ("auto", "required")
    forced = [tool for tool in known if choice in ("auto", "required", tool.name)]
    grammar = _grammar(format, forced, choice, is_one=is_one, spec=spec)
    return PreparedChat(
        ready,
        {"tools": [tool.shown for tool in known]},
        grammar,
        format,
        known,
        max_calls=1 if is_one else None,
        is_forced=grammar is not None,
    )


def read_tools(tools: Sequence[Any]) -> tuple[Tool, ...]:
    """Checked tools; RequestError names the first that cannot be used."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools holds {len(tools)} tools; give up to {MAX_TOOLS}.")
    found = []
    for number, tool in enumerate(tools):
        with about(f"tools[{number}]"):
            found.append(_tool(tool, f"tools[{number}]"))
    names = [tool.name for tool in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise RequestError(f"tools holds {some(twice)} more than once; give each tool one name.")
    return tuple(found)


def _tool(tool: Any, where: str) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type") != "function":
        raise RequestError(
            f'{where} is not {{"type": "function", "function": {{...}}}}; this server knows no '
            "other tools."
        )
    known = ("name", "description", "parameters", "strict")
    unknown = [*(set(tool) - {"type", "function"}), *(set(function) - set(known))]
    if unknown:
        raise RequestError(f"{where} holds {some(sorted(unknown))}, which is not known.")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where} has the name {str(name)[:70]!r}; give 1 to 64 letters, digits, _, - or dots."
        )
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(f"{where} has parameters that are not a JSON schema (an object).")
    with about(f"{where}.function.parameters"):
        check_form(parameters)
    if type(function.get("strict")) not in (bool, type(None)):
        raise RequestError(f"{where} has a strict that is neither true nor false.")
    if not isinstance(function.get("description"), str | None):
        raise RequestError(f"{where} has a description that is not text.")
    shown = {key: function[key] for key in known[:3] if function.get(key) is not None}
    return Tool(
        name,
        parameters if parameters is not None else {"type": "object", "properties": {}},
        function.get("strict") is True,
        {"type": "function", "function": shown},
        where,
    )


def _choice(choice: Any, tools: Sequence[Tool]) -> str:
    """none, auto, required, or the name of a tool."""
    names = [tool.name for tool in tools]
    if choice is None:
        return "auto" if tools else "none"
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if choice.get("type") == "function" and name in names:
            return str(name)
        if choice.get("type") == "function":
            raise RequestError(
                f"tool_choice names {str(name)[:70]!r}, which is not in tools "
                f"({some(names) or 'none given'})."
            )
    elif choice in ("none", "auto"):
        return str(choice)
    elif choice == "required" and tools:
        return "required"
    elif choice == "required":
        raise RequestError("tool_choice is required and no tools are given.")
    raise RequestError(
        f"tool_choice is {str(choice)[:70]!r}; give none, auto, required, or "
        '{"type": "function", "function": {"name": ...}}.'
    )


def _grammar(
    format: ToolFormat, tools: Sequence[Tool], choice: str, *, is_one: bool,
    spec: GrammarSpec | None,
) -> GrammarSpec | None:  # fmt: skip
    if choice != "auto":
        return GrammarSpec.of("tools' schema", _calls(format, tools, is_one=is_one), "tools")
    if spec is not None:
        either = [_calls(format, tools, is_one=is_one), spec.format]
        return GrammarSpec.of(spec.what, {"type": "or", "elements": either}, spec.field)
    if not any(tool.is_strict for tool in tools):
        return None
    if not format.begin:
        raise RequestError(
            "a tool is strict with tool_choice auto, and this model's calls have no mark by which "
            "they could be told from text. Leave strict out, or set tool_choice to required.",
            field="tools",
        )
    return GrammarSpec.of("tools' schema", _triggered(format, tools, is_one=is_one), "tools")


def _calls(format: ToolFormat, tools: Sequence[Tool], *, is_one: bool) -> Format:
    """Calls and nothing else."""
    calls: Format = {
        "type": "tags_with_separator", "tags": _tags(format, tools),
        "separator": format.separator, "at_least_one": True, "stop_after_first": is_one,
    }  # fmt: skip
    begin, end = format.wrapper
    return {"type": "tag", "begin": begin, "content": calls, "end": end} if begin else calls


def _triggered(format: ToolFormat, tools: Sequence[Tool], *, is_one: bool) -> Format:
    """Text, and calls that are held to their format from their first mark on."""
    if format.wrapper[0]:
        tags, trigger = [_calls(format, tools, is_one=is_one)], format.wrapper[0]
    else:
        tags, trigger = _tags(format, tools), format.begin
    return {
        "type": "triggered_tags", "triggers": [trigger], "tags": tags,
        "stop_after_first": is_one,
    }  # fmt: skip


def _tags(format: ToolFormat, tools: Sequence[Tool]) -> list[Format]:
    return [
        {
            "type": "tag",
            "begin": format.prefix.format(name=tool.name, json_name=json.dumps(tool.name)),
            "content": schema_format(tool.schema(), format.style),
            "end": format.suffix,
        }
        for tool in tools
    ]


def _message(message: Mapping[str, Any], format: ToolFormat | None) -> dict[str, Any]:
    """A message as chat templates read it: earlier calls with their arguments as objects."""
    result = dict(message)
    calls = message.get("tool_calls")
    if calls is None:
        return result
    if message.get("role") != "assistant" or not isinstance(calls, list):
        raise RequestError("messages holds tool_calls that are not a list in an assistant message.")
    as_text = format is not None and format.arguments_as == "text"
    result["tool_calls"] = [_earlier_call(call, as_text=as_text) for call in calls]
    if as_text and not result.get("content"):
        result["content"] = None  # such templates ask for none, not for emptiness
    return result


def _earlier_call(call: Any, *, as_text: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(
            "messages holds a tool call that is not "
            '{"id": ..., "type": "function", "function": {"name": ..., "arguments": "..."}}.'
        )
    arguments = function.get("arguments") or "{}"
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, Mapping):
        raise RequestError(
            f"messages holds a call of {function['name'][:70]!r} whose arguments are not a JSON "
            "object. Send what the model wrote; leave a call out that max_tokens has cut off."
        )
    shown = json.dumps(value, ensure_ascii=False) if as_text else dict(value)
    if as_text and isinstance(arguments, str):
        shown = arguments
    return {**call, "type": "function", "function": {**function, "arguments": shown}}
