"""How models write tool calls: one table entry per format, and the readers of a single call.

A format says which texts surround a call, how a forced call is spelled (the same texts, so that
what was forced can always be read), and how the chat template wants earlier calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headstart.errors import ConfigError
from headstart.server.tools.arguments import Schemas, xml_arguments


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # JSON


# What reading the text between a format's markers gives: a call, "open" where an end marker stands
# inside of a string, so that the call goes on, or "malformed".
Reading = Call | Literal["open", "malformed"]


@dataclass(frozen=True)
class ToolFormat:
    """One way to write tool calls."""

    name: str
    begin: str  # of a call; empty: the whole answer is calls, or none of it
    end: str
    read: Callable[[str, Schemas], Reading]  # the text between begin and end
    signs: tuple[str, ...]  # all of them stand in chat templates that use this format
    prefix: str  # a forced call up to its arguments; {name} and {json_name} are filled in
    suffix: str
    style: str = "json"  # of the arguments, in xgrammar's words
    separator: str = "\n"
    wrapper: tuple[str, str] = ("", "")  # around all calls
    head: re.Pattern[str] | None = None  # where arguments can be streamed: what precedes them
    arguments_as: Literal["object", "text"] = "object"  # in messages, for the chat template
    markers: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        found = (self.begin, self.end, *self.wrapper, *_MORE_MARKERS.get(self.name, ()))
        object.__setattr__(self, "markers", tuple(text for text in found if text))


def _deepseek(words: str) -> str:
    """Its special tokens have a wide bar, and a low block for the spaces."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_CALL, _CALL_END = _deepseek("tool call begin"), _deepseek("tool call end")
_CALLS, _CALLS_END = _deepseek("tool calls begin"), _deepseek("tool calls end")
_SEP = _deepseek("tool sep")
_MORE_MARKERS = {
    "deepseek_v3": (_SEP,), "deepseek_v31": (_SEP,),
    "llama3_json": ("<|python_tag|>",),
}  # fmt: skip
_STRING = r'"(?:[^"\\]|\\.)*"'
_JSON_HEAD = re.compile(
    rf'\s*\{{\s*"name"\s*:\s*(?P<json_name>{_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*'
    r"(?=\{)",
    re.DOTALL,
)
_DEEPSEEK_V3_HEAD = re.compile(rf"\s*(?:function)?{_SEP}(?P<name>[^\n]+)\n```json\s*(?=\{{)")
_DEEPSEEK_V31_HEAD = re.compile(rf"\s*(?P<name>[^<\s]+)\s*{_SEP}\s*(?=\{{)")


def _decoder(*, strict: bool) -> json.JSONDecoder:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.JSONDecoder(strict=strict, parse_constant=refuse)


_STRICT, _LENIENT = _decoder(strict=True), _decoder(strict=False)


def called_name(head: re.Match[str]) -> str:
    """The tool's name, from a match of `ToolFormat.head`."""
    found = head.groupdict()
    return str(json.loads(found["json_name"])) if "json_name" in found else found["name"].strip()


def _after_head(head: re.Pattern[str], tail: str) -> Callable[[str, Schemas], Reading]:
    """A reader of: head, JSON arguments, tail."""
    ending = re.compile(rf"\s*{tail}\s*")

    def read(body: str, schemas: Schemas) -> Reading:
        found = head.match(body)
        if found is None:
            return "malformed"
        try:
            value, stop = _LENIENT.raw_decode(body, found.end())
            name = called_name(found)
        except (ValueError, RecursionError) as error:
            return _why(error)
        if ending.fullmatch(body, stop) is None:
            return "malformed"
        return Call(name, _as_written(body[found.end() : stop], value))

    return read


def _read_json(body: str, schemas: Schemas) -> Reading:
    """{"name": ..., "arguments": {...}}, in either order, arguments perhaps as text."""
    found = _read_json_in_order(body, schemas)
    if found != "malformed":
        return found
    try:
        value, stop = _LENIENT.raw_decode(body.strip())
    except (ValueError, RecursionError) as error:
        return _why(error)
    is_whole = stop == len(body.strip())
    return (_json_call(value) if is_whole else None) or "malformed"


def _json_call(value: Any) -> Call | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = _LENIENT.decode(arguments or "{}")
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, Mapping) or not value["name"]:
        return None
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))


def _as_written(text: str, value: Any) -> str:
    """The model's own spelling, where every JSON parser reads it."""
    try:
        _STRICT.decode(text)
    except ValueError:
        return json.dumps(value, ensure_ascii=False)
    return text


def _why(error: Exception) -> Literal["open", "malformed"]:
    is_open = isinstance(error, json.JSONDecodeError) and error.msg.startswith("Unterminated")
    return "open" if is_open else "malformed"


_read_json_in_order = _after_head(_JSON_HEAD, r"\}")


def _xml(head: str, argument: tuple[str, str], tail: str) -> Callable[[str, Schemas], Reading]:
    """A reader of: head with the name, arguments with name and value, tail."""
    opening, closing = argument
    begins, ends = re.compile(head), re.compile(rf"\s*{tail}\s*")
    opens = re.compile(rf"\s*{opening}", re.DOTALL)
    whole = re.compile(rf"\s*{opening}(.*?){closing}", re.DOTALL)

    def read(body: str, schemas: Schemas) -> Reading:
        begin = begins.match(body)
        if begin is None:
            return "malformed"
        name, at = begin[1].strip(), begin.end()
        values: list[tuple[str, str]] = []
        while (part := whole.match(body, at)) is not None:
            values.append((part[1].strip(), part[2]))
            at = part.end()
        if ends.fullmatch(body, at) is None:
            return "open" if opens.match(body, at) else "malformed"
        return Call(name, xml_arguments(values, schemas.get(name, {})))

    return read


_read_qwen = _xml(
    r"\s*<function=([^>\n]+)>", (r"<parameter=([^>\n]+)>", "</parameter>"), "</function>"
)
_read_glm = _xml(r"\s*([^\s<]+)", (r"<arg_key>([^<]*)</arg_key>\s*<arg_value>", "</arg_value>"), "")


def read_bare(text: str) -> list[Call] | None:
    """Calls that are the whole answer, `;` or white space between them; None where it is not."""
    text = text.strip().removeprefix("<|python_tag|>").strip()
    calls: list[Call] = []
    while text:
        try:
            value, stop = _LENIENT.raw_decode(text)
        except (ValueError, RecursionError):
            return None
        call = _json_call(value)
        if call is None or not {"arguments", "parameters"} & value.keys():
            return None
        calls.append(call)
        text = text[stop:].lstrip("; \t\r\n")
    return calls or None


TOOL_FORMATS = {
    known.name: known
    for known in (
        ToolFormat(
            "deepseek_v3", _CALL, _CALL_END,
            _after_head(_DEEPSEEK_V3_HEAD, "```"), (_CALL, "```json"),
            f"{_CALL}function{_SEP}{{name}}\n```json\n", f"\n```{_CALL_END}",
            wrapper=(_CALLS, _CALLS_END),
            head=_DEEPSEEK_V3_HEAD, arguments_as="text",
        ),
        ToolFormat(
            "deepseek_v31", _CALL, _CALL_END,
            _after_head(_DEEPSEEK_V31_HEAD, ""), (_CALL,),
            f"{_CALL}{{name}}{_SEP}", _CALL_END, separator="",
            wrapper=(_CALLS, _CALLS_END),
            head=_DEEPSEEK_V31_HEAD, arguments_as="text",
        ),
        ToolFormat(
            "glm", "<tool_call>", "</tool_call>", _read_glm,
            ("<tool_call>", "<arg_key>"), "<tool_call>{name}\n", "\n</tool_call>",
            style="glm_xml",
        ),
        ToolFormat(
            "qwen_xml", "<tool_call>", "</tool_call>", _read_qwen,
            ("<tool_call>", "<function=", "<parameter="), "<tool_call>\n<function={name}>\n",
            "\n</function>\n</tool_call>", style="qwen_xml",
        ),
        ToolFormat(
            "hermes", "<tool_call>", "</tool_call>", _read_json, ("<tool_call>",),
            '<tool_call>\n{{"name": {json_name}, "arguments": ', "}\n</tool_call>",
            head=_JSON_HEAD,
        ),
        ToolFormat(
            "llama3_json", "", "", _read_json, ('"parameters"', "ipython"),
            '{{"name": {json_name}, "parameters": ', "}", separator="; ",
        ),
    )
}  # fmt: skip


def tool_format(choice: str | None, chat_template: str | None) -> ToolFormat | None:
    """A format by name; for None or "auto" the first whose signs are all in the template."""
    if choice in (None, "auto"):
        for known in TOOL_FORMATS.values():
            if all(sign in (chat_template or "") for sign in known.signs):
                return known
        return None
    if choice != "none" and choice not in TOOL_FORMATS:
        raise ConfigError(
            f"the tool-call parser is {choice!r}; expected auto, none, {', '.join(TOOL_FORMATS)}."
        )
    return TOOL_FORMATS.get(choice or "none")
