"""The tools of a request and its tool_choice, read and checked.

What comes of them, in the prompt and in the answer, is the job of calls.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headstart.errors import RequestError, some
from headstart.server.grammars.schema_rules import check_form, enforceable
from headstart.server.refusals import about
from headstart.server.tools.arguments import is_object_schema

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
class Choice:
    """What tool_choice asks for; a tool may have the name of a mode."""

    mode: Literal["none", "auto", "required", "named"]
    tool: Tool | None = None  # the named one


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


def read_choice(choice: Any, tools: Sequence[Tool]) -> Choice:
    """A checked tool_choice; without one the model decides."""
    if choice is None:
        return Choice("auto" if tools else "none")
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if choice.get("type") == "function":
            for tool in tools:
                if tool.name == name:
                    return Choice("named", tool)
            names = [tool.name for tool in tools]
            raise RequestError(
                f"tool_choice names {str(name)[:70]!r}, which is not in tools "
                f"({some(names) or 'none given'})."
            )
    elif choice == "none":
        return Choice("none")
    elif choice == "auto":
        return Choice("auto")
    elif choice == "required" and tools:
        return Choice("required")
    elif choice == "required":
        raise RequestError("tool_choice is required and no tools are given.")
    raise RequestError(
        f"tool_choice is {str(choice)[:70]!r}; give none, auto, required, or "
        '{"type": "function", "function": {"name": ...}}.'
    )
