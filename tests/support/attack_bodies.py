"""Request bodies that mean harm: by name, where to send them, and which answers are fine."""

from __future__ import annotations

import json
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def text(**fields: Any) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 2, **fields}).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": HELLO, "max_tokens": 2, **fields}).encode()


def nested(levels: int) -> Any:
    found: Any = {}
    for _ in range(levels):
        found = {"a": found}
    return found


def schema(levels: int) -> Any:
    found: Any = {"type": "string"}
    for _ in range(levels):
        found = {"type": "object", "properties": {"a": found}}
    return found


def in_schema(found: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": found}}
    }


def with_tool(parameters: Any, **changes: Any) -> bytes:
    function = {"name": "f", "parameters": parameters, **changes}
    return chat(tools=[{"type": "function", "function": function}])


BIG = "9" * 400
DEEP = b"[" * 200_000
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES: dict[str, tuple[str, bytes, set[int]]] = {
    "huge max_tokens": (TEXT, b'{"prompt": "a", "max_tokens": %s}' % BIG.encode(), {400}),
    "huge n": (TEXT, text(n=10**30), {400}),
    "negative n": (TEXT, text(n=-(2**62)), {400}),
    "negative n of many prompts": (TEXT, text(prompt=["a", "b"], n=-1), {400}),
    "huge seed": (TEXT, text(seed=-(10**40)), {400}),
    "huge priority": (TEXT, text(priority=2**70), {400}),
    "largest priority": (TEXT, text(priority=-(2**63)), {400}),
    "priority that is not allowed": (TEXT, text(priority=-1), {400}),
    "no priority": (TEXT, text(priority=0), {200}),
    "huge float": (TEXT, b'{"prompt": "a", "temperature": 1e999}', {400}),
    "tiny float": (TEXT, text(temperature=1e-300), {400}),
    "huge bias": (TEXT, text(logit_bias={"5": 1e308}), {200, 400}),
    "bias of no token": (TEXT, text(logit_bias={"9" * 40: 1}), {400}),
    "huge token ids": (TEXT, text(prompt=[2**31 - 1]), {400}),
    "negative token ids": (TEXT, text(prompt=[-1]), {400}),
    "huge top_k": (TEXT, text(top_k=2**62), {200, 400}),
    "huge min_tokens": (TEXT, text(min_tokens=2**62), {400}),
    "top_k beyond a word": (TEXT, text(top_k=2**63), {400}),
    "min_tokens beyond a word": (TEXT, text(min_tokens=2**64 - 1, max_tokens=None), {400}),
    "largest top_k": (TEXT, text(top_k=2**63 - 1, temperature=1), {200}),
    "huge speculate": (TEXT, text(headstart={"speculate": 64}), {400}),
    "nan": (TEXT, b'{"prompt": "a", "temperature": NaN}', {400}),
    "infinity": (TEXT, b'{"prompt": "a", "top_p": -Infinity}', {400}),
    "nan in a schema": (CHAT, chat(**in_schema({"const": "X"})).replace(b'"X"', b"NaN"), {400}),
    "deep list": (TEXT, DEEP, {400}),
    "deep prompt": (TEXT, b'{"prompt": ' + DEEP, {400}),
    "deep harmless field": (TEXT, text(metadata=nested(150)), {200, 400}),
    "deep message": (CHAT, chat(messages=[{**HELLO[0], "x": nested(150)}]), {200, 400}),
    "deep template options": (CHAT, chat(chat_template_kwargs={"x": nested(150)}), {200, 400}),
    "deep tool": (CHAT, chat(tools=[{**TOOL, "x": nested(150)}]), {400}),
    "deep tool parameters": (
        CHAT,
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": schema(80)}}]),
        {200, 400},
    ),
    "deep schema": (CHAT, chat(**in_schema(schema(90))), {400}),
    "types in a type": (CHAT, chat(**in_schema({"type": [["string"]]})), {400}),
    "an object for a type": (CHAT, chat(**in_schema({"type": {"a": 1}})), {400}),
    "no type beside const": (CHAT, chat(**in_schema({"type": [{}], "const": 1})), {400}),
    "a list for a format": (CHAT, chat(**in_schema({"type": "string", "format": ["x"]})), {400}),
    "a list for properties": (CHAT, chat(**in_schema({"properties": [1]})), {400}),
    "an object for a tool's type": (CHAT, with_tool({"type": {"a": 1}}), {400}),
    "the same in a strict tool": (CHAT, with_tool({"type": {"a": 1}}, strict=True), {400}),
    "an object for an argument's type": (
        CHAT, with_tool({"properties": {"a": {"anyOf": [{"type": [{}]}]}}}), {400},
    ),
    "a list for a tool's properties": (CHAT, with_tool({"properties": [1]}), {400}),
    "a tool's type behind a reference": (
        CHAT, with_tool({"properties": {"a": {"$ref": "#/x"}}, "x": {"type": [{}]}}), {200},
    ),
    "bytes that are no text": (TEXT, b'{"prompt": "\xff\xfe\xc0\x80"}', {400}),
    "half a character": (TEXT, b'{"prompt": "\\ud800", "max_tokens": 2}', {200, 400}),
    "half a character in a stop": (TEXT, text(stop=["\ud800"]), {200, 400}),
    "half a character in a name": (TEXT, text(model="\ud800"), {400, 404}),
    "half a character in a field": (TEXT, text(**{"\ud800": 1}), {400}),
    "half a character in a chat": (
        CHAT, chat(messages=[{"role": "user", "content": "\udfff"}], stream=True), {200, 400},
    ),
    "half a character in a tool": (
        CHAT, chat(tools=[{"type": "function", "function": {"name": "\ud800"}}]), {400},
    ),
    "zero bytes": (TEXT, text(prompt="\0" * 50, stop=["\0"]), {200}),
    "a mark of byte order": (TEXT, b"\xef\xbb\xbf" + text(), {200, 400}),
    "utf-16": (TEXT, json.dumps({"prompt": "a"}).encode("utf-16"), {400}),
    "gigantic schema": (
        CHAT,
        chat(**in_schema({"properties": {f"p{n}": {"type": "string"} for n in range(30_000)}})),
        {400},
    ),
    "gigantic choice": (TEXT, text(structured_outputs={"choice": ["x" * 9] * 90_000}), {200, 400}),
    "schema that refers to itself": (
        CHAT, chat(**in_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})),
        {200, 400},
    ),
    "regex that explodes": (
        TEXT, text(structured_outputs={"regex": "(((a{1,99}){1,99}){1,99}){1,99}"}), {200, 400},
    ),
    "regex that is none": (TEXT, text(structured_outputs={"regex": "[" * 1000}), {400}),
    "grammar without an end": (TEXT, text(structured_outputs={"grammar": "root ::= root"}), {400}),
    "grammar of a million rules": (
        TEXT, text(structured_outputs={"grammar": 'root ::= "a"\n' * 100_000}), {400},
    ),
    "a megabyte of stops": (TEXT, text(stop=[f"s{n}" for n in range(150_000)]), {400}),
    "a stop of a megabyte": (TEXT, text(stop="s" * (1 << 20)), {400}),
    "empty stops": (TEXT, text(stop=["", ""]), {200, 400}),
    "a name of a megabyte": (TEXT, text(model="m" * (1 << 20)), {404}),
    "a field of a megabyte": (TEXT, text(**{"f" * (1 << 20): 1}), {400}),
    "a million prompts": (TEXT, text(prompt=["a"] * 500_000), {400}),
    "a million biases": (TEXT, text(logit_bias={str(n): 1 for n in range(200_000)}), {400}),
    "a million messages": (CHAT, chat(messages=HELLO * 100_000), {400}),
    "a prompt of megabytes": (TEXT, text(prompt="a" * (7 << 20)), {400}),
    "a body that is too long": (TEXT, text(prompt="a" * (9 << 20)), {413}),
    "keys twice": (
        TEXT, b'{"prompt": "a", "max_tokens": 9, "prompt": "b", "max_tokens": 2}',
        {200},
    ),
    "nothing": (TEXT, b"", {400}),
    "null": (CHAT, b"null", {400}),
    "an empty chat": (CHAT, chat(messages=[]), {400}),
    "a template of the client": (
        CHAT, chat(chat_template_kwargs={"chat_template": "{{ 9 ** 9 ** 9 }}"}), {400},
    ),
    "no token left": (
        TEXT, text(structured_outputs={"regex": "[ab]"}, allowed_token_ids=[7, 8, 9]), {400},
    ),
    "tokens of a megabyte": ("/tokenize", json.dumps({"prompt": "ab" * (1 << 19)}).encode(), {400}),
    "ids of no token": ("/detokenize", b'{"tokens": [300, -1, 99999999999999999999]}', {400}),
}  # fmt: skip
