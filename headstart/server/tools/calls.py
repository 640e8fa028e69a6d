"""Tools of a chat request: put into what the chat template gets, and forced if asked.

`tool_choice` none leaves the tools out. auto lets the model decide and reads what it wrote; tools
with `strict` are then held to their schema by a grammar once a call begins. required and a named
tool are forced by a grammar from the first token on, so that the answer always parses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.errors import RequestError
from headstart.server.grammars.specs import Format, GrammarSpec, schema_format
from headstart.server.refusals import about
from headstart.server.tools.described import described, has_place
from headstart.server.tools.formats import ToolFormat
from headstart.server.tools.parsing import ToolParser
from headstart.server.tools.requests import Tool, read_choice, read_tools


@dataclass(frozen=True)
class PreparedChat:
    """What a request's tools mean for its prompt, its grammar and its answer."""

    messages: list[dict[str, Any]]
    template_options: dict[str, Any] = field(default_factory=dict)
    grammar: GrammarSpec | None = None
    # None: the answer is content. Else special tokens must stay in its text: markers may be such.
    format: ToolFormat | None = None
    tools: tuple[Tool, ...] = ()
    max_calls: int | None = None
    is_forced: bool = False  # calls come out of a grammar, so they are well formed
    only_calls: bool = False  # and there is nothing else in the answer
    openings: Mapping[str, str] = field(default_factory=dict)  # of these calls, by tool

    def new_parser(self) -> ToolParser:
        """A parser for the text of one answer."""
        schemas = {tool.name: tool.parameters for tool in self.tools}
        return ToolParser(
            self.format, schemas, max_calls=self.max_calls, is_forced=self.is_forced,
            only_calls=self.only_calls, openings=self.openings,
        )  # fmt: skip


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
    """Check tools and earlier calls; `spec` is the grammar of an answer that is no call."""
    ready = []
    for number, message in enumerate(messages):
        with about(f"messages[{number}]"):
            ready.append(_message(message, format))
    with about("tools"):
        known = read_tools(tools or ())
    with about("tool_choice"):
        choice = read_choice(tool_choice, known)
    is_plain = chat_template is not None and not has_place(chat_template)
    if is_plain and format is not None:  # the template would leave out what it does not know
        shown = () if choice.mode == "none" else known
        ready = described(ready, shown, format, chat_template)
    if not known or choice.mode == "none":
        return PreparedChat(ready, grammar=spec)
    if format is None:
        raise RequestError(
            "tools is given and the format of this model's tool calls is not known. Start the "
            "server with --tool-call-parser.",
            field="tools",
        )
    is_one = parallel_tool_calls is False or choice.tool is not None
    callable_now = known if choice.tool is None else (choice.tool,)
    is_free = choice.mode == "auto"
    grammar = _grammar(format, callable_now, is_free=is_free, is_one=is_one, spec=spec)
    return PreparedChat(
        ready,
        {} if is_plain else {"tools": [tool.shown for tool in known]},
        grammar,
        format,
        known,
        max_calls=1 if is_one else None,
        is_forced=grammar is not None,
        only_calls=not is_free,
        openings={} if is_free else {tool.name: _opening(format, tool) for tool in callable_now},
    )


def _grammar(
    format: ToolFormat, tools: Sequence[Tool], *, is_free: bool, is_one: bool,
    spec: GrammarSpec | None,
) -> GrammarSpec | None:  # fmt: skip
    """`is_free`: the model decides whether it calls a tool."""
    if not is_free:
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
            "begin": _opening(format, tool),
            "content": schema_format(tool.schema(), format.style),
            "end": format.suffix,
        }
        for tool in tools
    ]


def _opening(format: ToolFormat, tool: Tool) -> str:
    """How a forced call is spelled up to its arguments."""
    return format.prefix.format(name=tool.name, json_name=json.dumps(tool.name))


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
