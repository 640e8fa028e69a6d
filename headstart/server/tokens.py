"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Any

from headstart.errors import RequestError
from headstart.server.model import ServedModel
from headstart.server.named_fields import called
from headstart.server.protocol.chat import for_template
from headstart.server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from headstart.server.stream import encoded
from headstart.server.tool_calls import prepare as prepare_tools


def tokenize(request: TokenizeRequest, model: ServedModel) -> bytes:
    """The answer as it is sent: of a long text it takes a while to write."""
    model.check_name(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages, and not both.", field="prompt")
    if model.tokenizer is None:
        raise RequestError("the checkpoint has no tokenizer.")
    ids = _ids(request, model)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_len, "tokens": ids}
    if request.return_token_strs:
        answer["token_strs"] = [model.pieces.text_of(token) for token in ids]
    return encoded(answer)


def _ids(request: TokenizeRequest, model: ServedModel) -> list[int]:
    if request.messages is None:
        assert request.prompt is not None
        return model.engine.prompts.encode(
            request.prompt, add_special_tokens=request.add_special_tokens
        )
    messages = for_template(request.messages, model.chat_template)
    chat = prepare_tools(
        messages, tools=request.tools, format=model.tool_format, chat_template=model.chat_template
    )
    options = {**request.template_options, **chat.template_options}
    with called({"prompt": "messages"}):
        return model.engine.prompts.read(chat.messages, options)


def detokenize(request: DetokenizeRequest, model: ServedModel) -> bytes:
    model.check_name(request.model)
    last = model.engine.model.config.vocab - 1
    bad = [token for token in request.tokens if token > last]
    if bad:
        raise RequestError(
            f"tokens holds {bad[0]}; the model has tokens 0 to {last}.", field="tokens"
        )
    return encoded({"prompt": model.decode(request.tokens)})
