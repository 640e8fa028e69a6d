"""Bodies of other APIs become chats; what is wrong is told with the names that the body has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from pydantic import PrivateAttr, ValidationError

from headstart.errors import ConfigError, RequestError
from headstart.server.apis.messages_request import CountTokensRequest, MessageFields
from headstart.server.apis.messages_writer import MessagesWriter
from headstart.server.apis.responses_request import ResponsesRequest
from headstart.server.apis.responses_writer import ResponsesWriter
from headstart.server.model import ServedModel
from headstart.server.options import ServerOptions
from headstart.server.preparation import Prepared, prepare_chat
from headstart.server.protocol.field_errors import field_refusal
from headstart.server.protocol.requests import ChatRequest
from headstart.server.refusals import Refusal
from headstart.server.tokens import TokenizeRequest, ids_of
from headstart.server.wire import encoded

Body = ResponsesRequest | MessageFields


def as_chat(body: Body) -> ChatRequest:
    """The chat that a body asks for; its checks speak of the body's own fields."""
    try:
        chat = body.as_chat()
    except ValidationError as error:
        refusal = field_refusal(error, body.model_dump())
        _rename(refusal, body)
        raise refusal from None
    return _Chat.of(body, chat)


class _Chat(ChatRequest):
    """A chat whose fields have other names in the body that it was made of."""

    _body: Body | None = PrivateAttr(default=None)

    @classmethod
    def of(cls, body: Body, chat: ChatRequest) -> _Chat:
        made = cls.model_construct(chat.model_fields_set, **dict(chat))
        made._body = body
        return made

    @property
    def own_names(self) -> dict[str, str]:
        names = super().own_names
        assert self._body is not None
        return {name: own_name(self._body, value) for name, value in names.items()}

    def check(self, limits: ServerOptions) -> None:
        assert self._body is not None
        with named_by(self._body):
            super().check(limits)


def own_name(body: Body, field: str) -> str:
    """A field of the chat, as the body calls it: `messages[0].content` as `input`."""
    first = re.split(r"[.\[]", field, maxsplit=1)[0]
    name = body.names.get(first)
    return field.replace(".function.parameters", ".parameters") if name is None else name


@contextmanager
def named_by(body: Body) -> Iterator[None]:
    try:
        yield
    except (RequestError, ConfigError) as error:
        if error.field is not None:
            error.args = (_own_words(body, str(error), error.field),)
            error.field = own_name(body, error.field)
        raise
    except Refusal as refusal:
        _rename(refusal, body)
        raise


def _rename(refusal: Refusal, body: Body) -> None:
    if refusal.param is not None:
        refusal.message = _own_words(body, refusal.message, refusal.param)
        refusal.param = own_name(body, refusal.param)


def _own_words(body: Body, message: str, field: str) -> str:
    """What is said of a field of the chat, with the body's name for it."""
    first = re.split(r"[.\[]", field, maxsplit=1)[0]
    name = body.names.get(first)
    if name is None:
        return message
    return re.sub(rf"\b{re.escape(first)}\b(?:\[\d+\]|\.\w+)*", lambda _: name, message)


def prepare_response(
    body: ResponsesRequest, chat: ChatRequest, answer_id: str, model: ServedModel,
    limits: ServerOptions,
) -> Prepared:  # fmt: skip
    writer = partial(ResponsesWriter, asked=body)
    with named_by(body):
        return prepare_chat(chat, answer_id, model, limits, new_writer=writer)


def prepare_message(
    body: MessageFields, chat: ChatRequest, answer_id: str, model: ServedModel,
    limits: ServerOptions,
) -> Prepared:  # fmt: skip
    with named_by(body):
        return prepare_chat(chat, answer_id, model, limits, new_writer=MessagesWriter)


def count_message_tokens(body: CountTokensRequest, model: ServedModel) -> bytes:
    """The answer of POST /v1/messages/count_tokens."""
    chat = as_chat(body)
    asked = TokenizeRequest(
        messages=chat.messages, tools=chat.tools, chat_template_kwargs=chat.chat_template_kwargs
    )
    with named_by(body):
        return encoded({"input_tokens": len(ids_of(asked, model))})
