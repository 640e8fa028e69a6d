"""Keys on all routes, bodies of other APIs than chats and completions, routes for operation."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

from attacks.grammars import hostile_grammars
from attacks.outcome import Outcome

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
# Routes that need no key (SECURITY.md); all others of the document must.
PUBLIC = {"/health", "/ping", "/load", "/version", "/metrics"}
_HELLO = [{"role": "user", "content": "a"}]
_BIG = 10**30


def _nested(levels: int) -> Any:
    found: Any = {}
    for _ in range(levels):
        found = {"a": found}
    return found


def response(**fields: Any) -> bytes:
    return json.dumps({"input": "a", "max_output_tokens": 2, **fields}).encode()


def message(**fields: Any) -> bytes:
    return json.dumps({"messages": _HELLO, "max_tokens": 2, **fields}).encode()


def hostile_bodies() -> Iterator[tuple[str, bytes]]:
    """What is wrong, huge, deep or half text in each field that only these bodies have."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{" * 9000}
    inputs: list[Any] = [
        None, 5, [], [5], [[]], [{}], "a" * (7 << 20), "\ud800", [{"type": "x" * (1 << 20)}],
        [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 20_000}],
        [call], [{"type": "function_call_output", "call_id": "none", "output": _nested(150)}],
        [{"type": "reasoning", "summary": [{"text": 5}]}] * 1000, [_nested(150)],
        [{"type": "item_reference", "id": "resp_1"}],
    ]  # fmt: skip
    yield from ((RESPONSES, response(input=each)) for each in inputs)
    tool = {"type": "function", "name": "f", "parameters": {"type": {"a": 1}}}
    fields: list[dict[str, Any]] = [
        {"max_output_tokens": _BIG}, {"max_output_tokens": -1}, {"text": {"format": _nested(150)}},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": [[]]}}}},
        {"tools": [tool]}, {"tools": [{**tool, "name": "\ud800"}]}, {"tools": [tool] * 5000},
        {"tool_choice": {"type": "function", "name": "none"}}, {"top_logprobs": _BIG},
        {"previous_response_id": "../../etc/passwd"}, {"include": ["x" * (1 << 20)]},
        {"reasoning": _nested(150)}, {"metadata": _nested(150)}, {"instructions": 5},
    ]  # fmt: skip
    yield from ((RESPONSES, response(**each)) for each in fields)
    blocks: list[Any] = [
        5, None, [5], [{}], [{"type": "text"}], [{"type": "text", "text": _nested(9)}],
        [{"type": "tool_use", "id": 5, "name": None, "input": "x"}],
        [{"type": "tool_result", "tool_use_id": "none", "content": _nested(150)}],
        [{"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}],
        [{"type": "document", "source": {"type": "url", "url": "http://127.0.0.1:1/"}}],
        [{"type": "text", "text": "a"}] * 20_000, "a" * (7 << 20), "\udfff",
    ]  # fmt: skip
    asked: list[dict[str, Any]] = [
        *({"messages": [{"role": "user", "content": each}]} for each in blocks),
        *({"system": each} for each in blocks), {"messages": _HELLO * 100_000},
        {"messages": []}, {"messages": {}}, {"max_tokens": _BIG}, {"max_tokens": None},
        {"stop_sequences": ["s" * (1 << 20)]}, {"stop_sequences": [""]},
        {"tools": [{"name": "f", "input_schema": {"type": [{}]}}]},
        {"tools": [{"name": "f", "input_schema": _nested(150)}]},
        {"tool_choice": {"type": "tool", "name": "none"}}, {"tool_choice": _nested(150)},
        {"thinking": {"type": "enabled", "budget_tokens": _BIG}}, {"output_config": _nested(150)},
        {"chat_template_kwargs": {"chat_template": "{{ 9 ** 9 ** 9 }}"}},
    ]  # fmt: skip
    for each in asked:
        yield MESSAGES, message(**each)
        yield COUNT, message(**{**each, "max_tokens": None}).replace(b', "max_tokens": null', b"")
    for path in (RESPONSES, MESSAGES, COUNT):
        yield from ((path, body) for body in (b"", b"null", b"[" * 200_000, b'{"a": NaN}'))


def hostile_formats() -> Iterator[tuple[str, bytes]]:
    """The schemas among the hostile grammars, where these bodies have theirs."""
    for grammar in hostile_grammars():
        if (form := grammar.get("response_format")) is None:
            continue
        schema = form["json_schema"]["schema"]
        own = {"type": "json_schema", "name": "x", "schema": schema}
        yield RESPONSES, response(text={"format": own}, max_output_tokens=8)
        output = {"format": {"type": "json_schema", "schema": schema}}
        yield MESSAGES, message(output_config=output, max_tokens=8)
        yield (
            MESSAGES,
            message(tools=[{"name": "f", "input_schema": schema}], tool_choice={"type": "any"}),
        )


def looping(content: str) -> Iterator[tuple[str, bytes]]:
    """The conversation for which the model's template never ends, by every other way in."""
    messages = [{"role": "user", "content": content}]
    yield RESPONSES, response(input=content)
    yield MESSAGES, message(messages=messages)
    yield COUNT, json.dumps({"messages": messages}).encode()
    yield "/tokenize", json.dumps({"messages": messages}).encode()


def keys(host: str, key: str, outcome: Outcome) -> None:
    """The key where it belongs, elsewhere, and nearly right: it may be in no line of the log."""
    given: list[tuple[int, dict[str, str]]] = [
        (200, {"Authorization": f"Bearer {key}"}), (401, {"Authorization": f"Basic {key}"}),
        (401, {"Authorization": f"Bearer {key}x"}), (401, {"User-Agent": key, "Referer": key}),
        (401, {"Authorization": f"Bearer {key[:-1]}"}), (401, {"Cookie": key}), (401, {}),
        (200, {"x-api-key": key}), (401, {"x-api-key": f"{key}x"}),
    ]  # fmt: skip
    for wanted, headers in given:
        for path in ("/v1/models", f"/v1/models?api_key={key}"):
            connection = http.client.HTTPConnection(host, timeout=60)
            connection.request("GET", path, headers=headers)
            found = connection.getresponse().status
            connection.close()
            outcome.ends[str(found)] += 1
            if found != wanted:
                outcome.broken.append(f"{headers} at {path}: {found}, expected {wanted}")


def without_key(host: str, outcome: Outcome, *, rounds: int) -> None:
    """Every route of the document, asked without a key and with a wrong one; settings of the
    server that are asked for again and again, and a cache that clients may not empty."""
    connection = http.client.HTTPConnection(host, timeout=120)

    def asked(method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        body = b"{}" if method == "POST" else None
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()

    document = json.loads(asked("GET", "/openapi.json", {})[1])
    routes = [(m.upper(), path) for path, ways in document["paths"].items() for m in ways]
    for _ in range(rounds):
        for method, path in routes:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
                status, said = asked(method, path.replace("{name}", "attacked"), headers)
                outcome.ends[str(status)] += 1
                if (status == 401) == (path in PUBLIC) or status >= 500:
                    outcome.broken.append(f"{method} {path} with {headers}: {status} {said[:80]!r}")
    connection.close()


def settings(host: str, headers: dict[str, str], outcome: Outcome, *, rounds: int) -> None:
    """With a key: no route tells keys or places on the machine, nor empties the cache."""
    connection = http.client.HTTPConnection(host, timeout=120)
    key = headers["Authorization"].split()[1].encode()
    for _ in range(rounds):
        for method, path in (
            ("GET", "/server_info"), ("GET", "/tokenizer_info"), ("GET", "/load"),
            ("GET", "/v1/models"), ("GET", "/openapi.json"), ("POST", "/reset_prefix_cache"),
        ):  # fmt: skip
            connection.request(method, path, b"" if method == "POST" else None, headers)
            answer = connection.getresponse()
            said = answer.read()
            outcome.ends[str(answer.status)] += 1
            wanted = 403 if method == "POST" else 200
            if answer.status != wanted or key in said or b"/tmp" in said:
                outcome.broken.append(f"{method} {path}: {answer.status} {said[:80]!r}")
    connection.close()
