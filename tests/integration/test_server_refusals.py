"""What cannot be answered is refused, with a message that names the field and says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.server_runs import VOCAB, Server

ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 24}

_NO_OBJECT = {"type": "object", "properties": [1]}


@pytest.fixture(scope="module")
def http(api_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api_server.url, verify=False, timeout=60) as made:
        yield made


REFUSED = [
    ({"nonsense": 1}, "nonsense", "'nonsense' is not known. Leave it out."),
    ({"temprature": 1}, "temprature", "'temprature' is not known. Did you mean 'temperature'?"),
    ({"max_token": 1}, "max_token", "Did you mean 'max_tokens'?"),
    ({"bad_words": ["x"]}, "bad_words", "give banned_token_ids; POST /tokenize says"),
    ({"chat_template": "x"}, "chat_template", "start the server with --chat-template FILE"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "shorten the prompt"),
    ({"reasoning_format": "none"}, "reasoning_format", "--reasoning-parser says how"),
    ({"enable_thinking": True}, "enable_thinking", "give it in chat_template_kwargs"),
    ({"stop_sequences": ["x"]}, "stop_sequences", "give stop"),
    ({"prompt": "x"}, "prompt", "give messages to a chat"),
    ({"guided_jso": {}}, "guided_jso", "Did you mean 'guided_json'?"),
    ({"n_predict": 5}, "n_predict", "give max_tokens"),
    ({"guided_json": {"not": {}}}, "structured_outputs.json", "Set strict to false"),
    ({"guided_json": {}, "grammar": "x"}, "guided_json", "are both given; give one."),
    ({"request_id": "a b"}, "request_id", "should match pattern"),
    ({"add_special_tokens": True}, "add_special_tokens", "writes the special tokens itself"),
    ({"best_of": 2}, "best_of", "'best_of' is not implemented: give n and choose yourself."),
    ({"modalities": ["text", "audio"]}, "modalities", "this server answers with text"),
    ({"echo": True}, "echo", "a chat has no text to repeat"),
    ({"temperature": -1}, "temperature", "temperature is -1"),
    ({"temperature": "hot"}, "temperature", "should be a valid number"),
    ({"n": 99}, "n", "at most 16"),
    ({"n": 0}, "n", "n is 0"),
    ({"n": -5}, "n", "n is -5; give at least 1."),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"top_logprobs": 2}, "top_logprobs", "without logprobs"),
    ({"stop": ["x"] * 65}, "stop", "at most 64"),
    ({"stop": ["x" * 300]}, "stop", "over 256 characters"),
    ({"stop": [""]}, "stop", "at least one character"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens is -1"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "is given with stream"),
    ({"max_tokens": 10**30}, "max_tokens", "should be less than"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "give one of them"),
    ({"seed": 1 << 70}, "seed", "should be less than"),
    ({"priority": -3}, "priority", "started without --allow-priority). Leave it out."),
    ({"priority": -11}, "priority", "greater than or equal to -10"),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "'user'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0]",
        "this server reads text",
    ),
    ({"messages": None}, "messages", "'messages' is missing"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "keys are token ids"),
    ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids", f"tokens 0 to {VOCAB - 1}"),
    ({"headstart": {"speculate": 17}}, "headstart.speculate", "equal to 16, or 'auto' or 'off'"),
    ({"headstart": {"speculate": "auto"}}, "headstart.speculate", "needs an engine that was"),
    ({"headstart": {"draft_vocab": "latin"}}, "headstart.draft_vocab", "is called 'latin'"),
    ({"headstart": {"draft_from": "tail"}}, "headstart.draft_from", "'auto', 'head' or 'context'"),
    ({"headstart": {"speed": 3}}, "headstart.speed", "'headstart.speed' is not known. Leave"),
    ({"headstart.speculate": 3}, "headstart.speculate", "not known. Did you mean 'headstart'?"),
    ({"headstart": {"spekulate": 3}}, "headstart.spekulate", "mean 'headstart.speculate'?"),
    (
        {"chat_template_kwargs": {"tokenize": True}},
        "chat_template_kwargs",
        "the engine sets itself",
    ),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "not for the"),
    ({"allowed_token_ids": [3] * 5000}, "allowed_token_ids", "at most 4096"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "without stream"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", "the prompt has 50"),
    ({"max_tokens": 5000}, "max_tokens", "may have 4096. Ask for up to 4089, or leave"),
    (
        {"max_completion_tokens": 5000, "max_tokens": None},
        "max_completion_tokens",
        "Ask for up to",
    ),
    ({"stop": 5}, "stop", "should be a valid string"),
    ({"tools": [{"type": "search"}]}, "tools[0]", "knows no other tools"),
    ({"response_format": {"type": "xml"}}, "response_format", "has the type 'xml'"),
    (
        {"structured_outputs": {"regex": "("}},
        "structured_outputs.regex",
        "the regex cannot be used",
    ),
    (
        {"structured_outputs": {"json": {"type": "object", "required": 5}}},
        "structured_outputs.json",
        "is not a list of names",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"anyOf": []}}}},
        "response_format.json_schema",
        "is not a list of schemas",
    ),
    (
        {"structured_outputs": {"json": {"properties": {"a": {"type": {"b": 1}}}}}},
        "structured_outputs.json",
        "type at #/properties/a is \"{'b': 1}\"; give text, or a list of texts.",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": _NO_OBJECT}}]},
        "tools[0].function.parameters",
        "properties at # is '[1]'; give an object of schemas.",
    ),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "logprobs is -1"),
    ({"messages": [{"role": "user", "content": "x" * 200000}]}, None, "larger than 100,000 bytes"),
]


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_what_cannot_be_answered_is_refused_by_name(
    http: httpx.Client, fields: dict[str, Any], param: str | None, said: str
) -> None:
    answer = http.post("/v1/chat/completions", json={**ASKED, **fields})
    assert answer.status_code == (413 if "larger" in said else 400), answer.text
    error = answer.json()["error"]
    assert said in error["message"] and error["param"] == param
    assert error["type"] == "invalid_request_error" and error["code"]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"nonsense": 1}, "unknown_parameter"),
        ({"best_of": 2}, "unsupported_parameter"),
        ({"messages": None}, "missing_required_parameter"),
        ({"messages": []}, "empty_array"),
        ({"temperature": "hot"}, "invalid_type"),
        ({"temperature": -1}, "invalid_value"),
        ({"messages": [{"role": "king", "content": "x"}]}, "invalid_value"),
        ({"max_tokens": 10**30}, "integer_above_max_value"),
        ({"n": 99}, "integer_above_max_value"),
        ({"n": -1}, "integer_below_min_value"),
        ({"logprobs": True, "top_logprobs": 21}, "integer_above_max_value"),
        ({"stop": ["x"] * 65}, "array_above_max_length"),
        ({"allowed_token_ids": [3] * 5000}, "array_above_max_length"),
        ({"model": "gpt"}, "model_not_found"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_refusals_have_openais_codes(http: httpx.Client, fields: dict[str, Any], code: str) -> None:
    error = http.post("/v1/chat/completions", json={**ASKED, **fields}).json()["error"]
    assert error["code"] == code


def test_routes_that_do_not_exist_have_codes(http: httpx.Client) -> None:
    assert http.get("/v1/engines").json()["error"]["code"] == "unknown_url"
    assert http.get("/v1/completions").json()["error"]["code"] == "method_not_supported"


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[1]", b'{"prompt": NaN}', b'{"prompt": "\xff"}', b"[" * 9000, b"\x00"],
    ids=["empty", "open", "list", "nan", "not utf-8", "deep", "zero"],
)
def test_what_is_no_json_object_is_a_400(http: httpx.Client, data: bytes) -> None:
    answer = http.post("/v1/completions", content=data)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "the body is" in error["message"] and error["code"] == "invalid_json"


def test_what_is_too_long_has_the_code_that_clients_look_for(http: httpx.Client) -> None:
    long = [{"role": "user", "content": "x" * 5000}]
    for fields in ({"max_tokens": 5000}, {"messages": long}):
        error = http.post("/v1/chat/completions", json={**ASKED, **fields}).json()["error"]
        assert error["code"] == "context_length_exceeded"
    error = http.post("/tokenize", json={"prompt": "x" * 90_000}).json()["error"]
    assert error["code"] == "context_length_exceeded"


def test_a_clients_words_do_not_choose_the_code(http: httpx.Client) -> None:
    """Regression: a message that held the engine's words about lengths got the code for those."""
    own = {"draft_vocab": "prompt and answer together may have"}
    error = http.post("/v1/chat/completions", json={**ASKED, "headstart": own}).json()["error"]
    assert error["code"] == "invalid_value" and own["draft_vocab"] in error["message"]


def test_tokens_of_a_text_that_is_far_too_long_are_not_looked_for(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "x" * 90_000})
    assert answer.status_code == 400 and "the prompt has over" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "prompt"
    assert http.post("/tokenize", json={"prompt": "x" * 900}).json()["count"] == 900


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 90_000}]}, "messages"),
        ("/tokenize", {**ASKED, "max_tokens": None, "tools": [{}]}, "tools[0]"),
        ("/detokenize", {"tokens": [3, VOCAB]}, "tokens"),
        ("/v1/completions", {"prompt": ["a"] * 17}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        (
            "/v1/completions",
            {"prompt": "a", "headstart": {"draft_from": 1}},
            "headstart.draft_from",
        ),
        ("/v1/completions", {"prompt": "x" * 5000}, "prompt"),
    ],
)
def test_other_routes_name_their_fields_too(
    http: httpx.Client, route: str, fields: dict[str, Any], param: str
) -> None:
    given = {name: value for name, value in fields.items() if value is not None}
    answer = http.post(route, json=given)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
