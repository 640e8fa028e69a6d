"""POST /tokenize and POST /detokenize: their bodies and their answers."""

from __future__ import annotations

from typing import Any

from headstart.errors import ConfigError, RequestError
from headstart.server.model import ServedModel
from headstart.server.protocol.base import Part, TokenIds
from headstart.server.protocol.messages import Messages, Tools, for_template, template_options
from headstart.server.refusals import renamed
from headstart.server.tools.calls import prepare as prepare_tools
from headstart.server.wire import encoded


class TokensRequest(Part):
    """What the bodies of both routes have in common."""

    model: str | None = None


class TokenizeRequest(TokensRequest):
    """A text, or messages that go through the chat template."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    return_token_strs: bool = False

    @property
    def template_options(self) -> dict[str, Any]:
        return {
            "add_generation_prompt": self.add_generation_prompt,
            **template_options(self.chat_template_kwargs),
        }


class DetokenizeRequest(TokensRequest):
    tokens: TokenIds


def tokenize(request: TokenizeRequest, model: ServedModel) -> bytes:
    """The answer as it is sent: of a long text it takes a while to write."""
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages, and not both.", field="prompt")
    if model.tokenizer is None:
        raise RequestError("the checkpoint has no tokenizer.")
    ids = ids_of(request, model)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_len, "tokens": ids}
    if request.return_token_strs:
        answer["token_strs"] = [model.pieces.text_of(token) for token in ids]
    return encoded(answer)


def ids_of(request: TokenizeRequest, model: ServedModel) -> list[int]:
    if request.messages is None:
        assert request.prompt is not None
        return model.engine.prompts.encode(
            request.prompt, add_special_tokens=request.add_special_tokens
        )
    messages = for_template(request.messages)
    chat = prepare_tools(
        messages, tools=request.tools, format=model.tool_format, chat_template=model.chat_template
    )
    options = {**request.template_options, **chat.template_options}
    try:
        return model.engine.prompts.read(chat.messages, options)
    except (RequestError, ConfigError) as error:
        raise renamed(error, {"prompt": "messages"}) from None


def detokenize(request: DetokenizeRequest, model: ServedModel) -> bytes:
    last = model.engine.model.config.vocab - 1
    bad = [token for token in request.tokens if token > last]
    if bad:
        raise RequestError(
            f"tokens holds {bad[0]}; the model has tokens 0 to {last}.", field="tokens"
        )
    return encoded({"prompt": model.decode(request.tokens)})
