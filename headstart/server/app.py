"""The routes of a server: which function answers which path. What they do lies elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException

from headstart import __version__
from headstart.errors import ConfigError, RequestError
from headstart.server.access import Access, is_guarded
from headstart.server.answer_schemas import answered
from headstart.server.answering import answer_route
from headstart.server.api_docs import body_of, describe
from headstart.server.apis.messages_request import CountTokensRequest, MessagesRequest
from headstart.server.apis.prepare import (
    as_chat,
    count_message_tokens,
    prepare_message,
    prepare_response,
)
from headstart.server.apis.responses_request import ResponsesRequest
from headstart.server.completions import CompletionRequest, prepare_completion
from headstart.server.intake import check_name
from headstart.server.operation import add_operation, document_response, json_response
from headstart.server.preparation import prepare_chat
from headstart.server.protocol.requests import ChatRequest
from headstart.server.pushed import add_push
from headstart.server.refusals import Refusal, no_such_route, refusal_of, where_instead
from headstart.server.state import ServerState
from headstart.server.templates.client import in_thread
from headstart.server.tokens import (
    DetokenizeRequest,
    TokenizeRequest,
    TokensRequest,
    detokenize,
    tokenize,
)
from headstart.server.wire import Observed, encoded, record_of


def create_app(state: ServerState) -> FastAPI:
    """All routes of a server; the caller starts `state.worker`."""
    # FastAPI's own /docs loads scripts from elsewhere; ours loads nothing.
    app = FastAPI(title="Headstart", version=__version__, redoc_url=None, docs_url=None)
    access = Access(state.options, is_public=state.is_public)
    keys = [Depends(access.check)]
    _add_answers(app, state, keys)
    _add_tokens(app, state, keys)
    add_operation(app, state, keys)
    add_push(app, state)
    for kind in (Refusal, RequestError, ConfigError):
        app.add_exception_handler(kind, _refuse)
    app.add_exception_handler(HTTPException, partial(_refuse_route, access))
    if state.options.cors_origin:
        app.add_middleware(
            CORSMiddleware, allow_origins=state.options.cors_origin, allow_methods=["*"],
            allow_headers=["*"],
        )  # fmt: skip
    app.add_middleware(Observed, metrics=state.metrics, model=state.names[0])
    describe(app)
    return app


def _add_answers(app: FastAPI, state: ServerState, keys: list[Any]) -> None:
    app.post(
        "/v1/chat/completions", name="chat_completions", description="Answer a conversation.",
        dependencies=keys, openapi_extra=body_of(ChatRequest, "ChatAnswer", streams=True),
    )(answer_route(state, ChatRequest, "chatcmpl-", prepare_chat))  # fmt: skip
    app.post(
        "/v1/completions", name="completions", description="Continue a text.",
        dependencies=keys,
        openapi_extra=body_of(CompletionRequest, "CompletionAnswer", streams=True),
    )(answer_route(state, CompletionRequest, "cmpl-", prepare_completion))  # fmt: skip
    app.post(
        "/v1/responses",
        name="responses",
        description="Answer a conversation, in OpenAI's newer form; nothing is kept.",
        dependencies=keys,
        openapi_extra=body_of(ResponsesRequest, "ResponsesAnswer", streams=True),
    )(answer_route(state, ResponsesRequest, "resp_", prepare_response, convert=as_chat))
    app.post(
        "/v1/messages", name="messages", description="Answer a conversation, in Anthropic's form.",
        dependencies=keys, openapi_extra=body_of(MessagesRequest, "MessagesAnswer", streams=True),
    )(answer_route(state, MessagesRequest, "msg_", prepare_message, convert=as_chat))  # fmt: skip

    @app.get("/v1/models", dependencies=keys, openapi_extra=answered("Models"))
    async def models() -> Response:
        """The served model, under all its names."""
        state.gate.check()
        return document_response({"object": "list", "data": state.model.cards()})

    @app.get("/v1/models/{name:path}", dependencies=keys, openapi_extra=answered("Model"))
    async def model(name: str) -> Response:
        """The served model, under this name."""
        state.gate.check()
        check_name(name, state.names)
        return document_response({**state.model.cards()[0], "id": name})


def _add_tokens(app: FastAPI, state: ServerState, keys: list[Any]) -> None:
    async def converted(
        request: Request,
        kind: type[TokensRequest | CountTokensRequest],
        convert: Callable[..., bytes],
    ) -> Response:
        state.gate.check()
        body = await state.bodies.read(request, kind)
        check_name(body.model, state.names)
        with state.gate.entry(1, is_timed=False):
            templates = state.model.templates
            return json_response(
                await in_thread(state.token_pool, templates, convert, body, state.model)
            )

    @app.post("/tokenize", dependencies=keys, openapi_extra=body_of(TokenizeRequest, "Tokens"))
    async def tokenize_text(request: Request) -> Response:
        """Token ids of a text or a conversation."""
        return await converted(request, TokenizeRequest, tokenize)

    @app.post(
        "/v1/messages/count_tokens",
        dependencies=keys,
        openapi_extra=body_of(CountTokensRequest, "CountAnswer"),
    )
    async def count_tokens(request: Request) -> Response:
        """How many tokens POST /v1/messages would read."""
        return await converted(request, CountTokensRequest, count_message_tokens)

    @app.post("/detokenize", dependencies=keys, openapi_extra=body_of(DetokenizeRequest, "Text"))
    async def detokenize_ids(request: Request) -> Response:
        """The text of token ids."""
        return await converted(request, DetokenizeRequest, detokenize)


async def _refuse_route(access: Access, request: Request, error: Exception) -> Response:
    """A path or a method that no route has; where the others want a key, so does this."""
    assert isinstance(error, HTTPException)
    path, headers = request.url.path, error.headers or {}
    if is_guarded(request, path):
        try:
            await access.check(request)
        except Refusal as refusal:
            return await _refuse(request, refusal)
    allowed = headers.get("Allow", "")
    said = where_instead(path) if error.status_code == 404 else f" Give {allowed}."
    message = f"{request.method[:20]} {path[:80]}: {error.detail}.{said}"
    return await _refuse(request, no_such_route(error.status_code, message, headers))


async def _refuse(request: Request, error: Exception) -> Response:
    refusal = refusal_of(error)
    record_of(request.scope).error = refusal.message
    body = encoded(refusal.body_for(request.url.path))
    return Response(body, refusal.status, refusal.headers, media_type="application/json")
