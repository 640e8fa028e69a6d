"""Requests that a machine makes of our OpenAPI document: some fit it and some do not."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.long_runs import unless_long
from support.server_runs import HTTP, Server

from headstart.server.apis.messages_request import MessagesRequest
from headstart.server.apis.responses_request import ResponsesRequest
from headstart.server.completions import CompletionRequest
from headstart.server.protocol.base import Part, means_nothing
from headstart.server.protocol.requests import ChatRequest
from headstart.server.tokens import DetokenizeRequest, TokenizeRequest

schemathesis = pytest.importorskip("schemathesis")
jsonschema_rs = pytest.importorskip("jsonschema_rs")  # of which schemathesis is made
CALLS = [
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/tokenize"),
    ("POST", "/detokenize"), ("GET", "/v1/models/{name}"), ("GET", "/v1/models"),
    ("GET", "/health"), ("POST", "/v1/responses"), ("POST", "/v1/messages"),
]  # fmt: skip
KINDS: dict[str, type[Part]] = {
    "/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest, "/v1/messages": MessagesRequest,
    "/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest,
}  # fmt: skip
_NEEDED = {"prompt", "messages", "tokens", "max_tokens", "input", "max_output_tokens"}
_SLOW = ("chat", "responses", "messages")
_EXAMPLES, _CHATS = unless_long((15, 8), (60, 24))  # a chat takes long to make up, and to answer


@pytest.fixture(scope="module")
def document(attacked: Server) -> dict[str, Any]:
    found: dict[str, Any] = HTTP.get(f"{attacked.url}/openapi.json").json()
    limits = {"ResponsesRequest": "max_output_tokens"}
    for kind in ("ChatRequest", "CompletionRequest", "MessagesRequest", "ResponsesRequest"):
        fields = found["components"]["schemas"][kind]["properties"]
        # Which number has room depends on model and prompt; one that has none is a 400.
        fields[limits.get(kind, "max_tokens")] = {"type": "integer", "minimum": 1, "maximum": 64}
    found["components"]["schemas"]["TokenizeRequest"]["required"] = ["prompt"]  # or messages
    prompts = found["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    prompts[0]["minLength"] = 1  # an empty one is refused, and is what is tried first
    return found


def test_the_document_lists_all_that_is_called_here(document: dict[str, Any]) -> None:
    listed = {(m.upper(), path) for path, ways in document["paths"].items() for m in ways}
    others = ("load", "metrics", "ping", "server_info", "tokenizer_info", "version")
    posts = ("/reset_prefix_cache", "/v1/messages/count_tokens")
    assert listed == {
        *CALLS, *(("GET", f"/{name}") for name in others), *(("POST", path) for path in posts),
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
@pytest.mark.parametrize(("method", "path"), CALLS, ids=lambda value: value.strip("/"))
def test_whatever_is_asked_is_answered_or_refused(
    attacked: Server, document: dict[str, Any], method: str, path: str, mode: str
) -> None:
    operation = schemathesis.openapi.from_dict(document)[path][method]
    if mode == "NEGATIVE" and "requestBody" not in document["paths"][path][method.lower()]:
        pytest.skip("there is nothing that could be wrong")

    @settings(
        max_examples=_CHATS if any(own in path for own in _SLOW) else _EXAMPLES,
        derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def ask(data: st.DataObject) -> None:
        way = schemathesis.GenerationMode[mode]
        case = data.draw(operation.as_strategy(generation_mode=way))
        if mode == "POSITIVE" and isinstance(case.body, dict) and data.draw(st.booleans()):
            # Of many fields one is out of range most of the time; these come through.
            has_messages = "chat" in path or path == "/v1/messages"
            needed = _NEEDED if has_messages else _NEEDED - {"messages"}
            case.body = {name: value for name, value in case.body.items() if name in needed}
        sent = case.as_transport_kwargs(base_url=attacked.url)
        answer = HTTP.request(
            sent["method"], sent["url"], params=sent.get("params"), headers=_headers(sent),
            content=_content(sent),
        )  # fmt: skip
        check(answer, case)
        statuses[answer.status_code] += 1
        if mode == "NEGATIVE" and answer.status_code < 400:
            assert is_right_after_all(document, path, case.body), case.body

    statuses: Counter[int] = Counter()
    ask()
    if mode == "NEGATIVE":
        assert sum(count for status, count in statuses.items() if status >= 400) > 0
    elif method == "POST":
        assert statuses[200] > 0, "nothing came through that could have gone wrong"


def is_right_after_all(document: dict[str, Any], path: str, body: Any) -> bool:
    """Whether the body fits its schema without the fields that mean nothing.

    The schema has no place for unknown fields, and the server takes those that are null, harmless
    or say what happens anyway. Hypothesis makes field names of strings in modules that are
    imported, so that in whole runs `metadata` can be among them.
    """
    if not isinstance(body, dict):
        return False
    kind = KINDS[path]
    rest = {n: value for n, value in body.items() if not means_nothing(kind, n, value)}
    if path == "/tokenize" and "messages" in rest:
        rest.setdefault("prompt", "")  # the document of these tests asks for one of the two
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    parts = {"components": document["components"]}
    return bool(jsonschema_rs.is_valid({**parts, **schema}, rest))


def _headers(sent: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    found = {**sent.get("headers", {}), "content-type": "application/json"}
    return [
        (k.encode("latin-1", "replace"), v.encode("latin-1", "replace")) for k, v in found.items()
    ]


def _content(sent: dict[str, Any]) -> bytes | None:
    body = sent.get("json", sent.get("data"))
    return body if body is None or isinstance(body, bytes) else json.dumps(body).encode()


def check(answer: Any, case: Any) -> None:
    assert answer.status_code < 500, (answer.text[:300], case.body)
    if answer.status_code >= 400:
        document = answer.json()
        own = {"message", "type", "param", "code"}
        assert set(document["error"]) == (own if "type" not in document else {"message", "type"})
