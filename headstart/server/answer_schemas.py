"""What answers look like, for the OpenAPI document: the fields that clients can count on."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_MAYBE_TEXT: Schema = {"type": ["string", "null"]}


def _object(**fields: Schema) -> Schema:
    """All of these are always there; there may be more."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_USAGE = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
_HEAD = {
    "id": _TEXT, "object": _TEXT, "created": _COUNT, "model": _TEXT, "usage": _USAGE,
}  # fmt: skip
_LOGPROBS: Schema = {"type": ["object", "null"]}
_MODEL = _object(id=_TEXT, object=_TEXT, created=_COUNT, owned_by=_TEXT, max_model_len=_COUNT)
SCHEMAS: dict[str, Schema] = {
    "ChatAnswer": _object(
        **_HEAD,
        choices=_list(
            _object(
                index=_COUNT, finish_reason=_TEXT, logprobs=_LOGPROBS,
                message=_object(role=_TEXT, content=_MAYBE_TEXT),
            )
        ),
    ),
    "CompletionAnswer": _object(
        **_HEAD,
        choices=_list(_object(index=_COUNT, finish_reason=_TEXT, logprobs=_LOGPROBS, text=_TEXT)),
    ),
    "ResponsesAnswer": _object(
        id=_TEXT, object=_TEXT, created_at=_COUNT, status=_TEXT, model=_TEXT,
        output=_list(_object(id=_TEXT, type=_TEXT)),
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "MessagesAnswer": _object(
        id=_TEXT, type=_TEXT, role=_TEXT, model=_TEXT, content=_list(_object(type=_TEXT)),
        stop_reason=_MAYBE_TEXT, usage=_object(input_tokens=_COUNT, output_tokens=_COUNT),
    ),
    "CountAnswer": _object(input_tokens=_COUNT),
    "Tokens": _object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT)),
    "Text": _object(prompt=_TEXT),
    "Models": _object(object=_TEXT, data=_list(_MODEL)),
    "Model": _MODEL,
    "Health": _object(status={"enum": ["starting", "ready", "draining", "dead"]}),
    "Load": _object(server_load=_COUNT),
    "Version": _object(version=_TEXT),
    "ServerInfo": _object(
        version=_TEXT, models=_list(_TEXT), engine={"type": "object"},
        server={"type": "object"}, max_model_len=_COUNT, head_version=_COUNT,
    ),
    "TokenizerInfo": _object(tokenizer_class=_TEXT, chat_template=_MAYBE_TEXT, vocab_size=_COUNT),
    "Empty": {"type": "object"},
}  # fmt: skip
REFERENCE = "#/components/schemas/{model}"


def answered(name: str, *, streams: bool = False) -> Schema:
    """What a route says of its answers: a document of this name, or events where it streams."""
    content: Schema = {"application/json": {"schema": reference(name)}}
    if streams:
        content["text/event-stream"] = {"schema": _TEXT}
    return {"responses": {"200": {"description": "answered", "content": content}}}


def reference(name: str) -> Schema:
    return {"$ref": REFERENCE.format(model=name)}
