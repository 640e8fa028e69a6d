"""The routes, and which clients may use them. What a route does beyond its body lives elsewhere."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException

from headstart import __version__
from headstart.errors import ConfigError, RequestError
from headstart.server.answering import Answering, Prepared, new_id, prepare_chat, prepare_completion
from headstart.server.api_docs import body_of, describe, fields_page
from headstart.server.page import page_response
from headstart.server.protocol.chat import ChatRequest
from headstart.server.protocol.completion import CompletionRequest
from headstart.server.protocol.sampling import SamplingFields
from headstart.server.refusals import Refusal, no_such_route, refusal_of
from headstart.server.state import ServerState
from headstart.server.tokens import (
    DetokenizeRequest,
    TokenizeRequest,
    TokensRequest,
    detokenize,
    tokenize,
)
from headstart.server.wire import Observed, encoded, note_of

_LOOPBACK = re.compile(r"127(\.\d{1,3}){3}")


def create_app(state: ServerState) -> FastAPI:
    """All routes of a server; the caller starts `state.worker`."""
    options, keys = state.options, Keys(state.options.api_keys)
    is_for_this_machine = not options.is_public and not options.api_keys  # no page knows a key
    # FastAPI's own /docs loads scripts from elsewhere; ours loads nothing.
    app = FastAPI(title="Headstart", version=__version__, redoc_url=None, docs_url=None)

    async def key(
        request: Request, authorization: Annotated[str | None, Header()] = None
    ) -> None:  # fmt: skip
        if is_for_this_machine:
            check_host(request.headers.get("host", ""), options.host)
        check_site(request.headers, options.cors_origin or ())
        keys.check(authorization)

    _add_answers(app, state, [Depends(key)])
    _add_tokens(app, state, [Depends(key)])
    _add_operation(app, state)
    for kind in (Refusal, RequestError, ConfigError, HTTPException):
        app.add_exception_handler(kind, _refuse)
    if state.options.cors_origin:
        app.add_middleware(
            CORSMiddleware, allow_origins=state.options.cors_origin, allow_methods=["*"],
            allow_headers=["*"],
        )  # fmt: skip
    app.add_middleware(Observed, metrics=state.metrics, model=state.names[0])
    describe(app)
    return app


def _add_answers(app: FastAPI, state: ServerState, keys: list[Any]) -> None:
    async def answering(
        request: Request, kind: type[SamplingFields], prefix: str, prepare: Callable[..., Prepared]
    ) -> Response:
        state.gate.check()
        body = await state.bodies.read(request, kind)
        state.check_name(body.model)
        body.check(state.options)
        return Answering(state, body, new_id(prefix), prepare)

    @app.post("/v1/chat/completions", dependencies=keys, openapi_extra=body_of(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await answering(request, ChatRequest, "chatcmpl", prepare_chat)

    @app.post("/v1/completions", dependencies=keys, openapi_extra=body_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue a text."""
        return await answering(request, CompletionRequest, "cmpl", prepare_completion)

    @app.get("/v1/models", dependencies=keys)
    async def models() -> Response:
        """The served model, under all its names."""
        return _document({"object": "list", "data": state.model.cards()})

    @app.get("/v1/models/{name:path}", dependencies=keys)
    async def model(name: str) -> Response:
        """One of those names."""
        card = state.model.cards()[0]
        state.check_name(name)
        return _document({**card, "id": name})


def _add_tokens(app: FastAPI, state: ServerState, keys: list[Any]) -> None:
    async def converted(
        request: Request, kind: type[TokensRequest], convert: Callable[..., bytes]
    ) -> Response:
        state.gate.check()
        body = await state.bodies.read(request, kind)
        state.check_name(body.model)
        with state.gate.entry(1, is_timed=False):
            return _json(await state.in_token_thread(convert, body, state.model))

    @app.post("/tokenize", dependencies=keys, openapi_extra=body_of(TokenizeRequest))
    async def tokenize_text(request: Request) -> Response:
        """Token ids of a text or a conversation."""
        return await converted(request, TokenizeRequest, tokenize)

    @app.post("/detokenize", dependencies=keys, openapi_extra=body_of(DetokenizeRequest))
    async def detokenize_ids(request: Request) -> Response:
        """The text of token ids."""
        return await converted(request, DetokenizeRequest, detokenize)


def _add_operation(app: FastAPI, state: ServerState) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return page_response()

    @app.get("/docs", include_in_schema=False)
    async def fields() -> Response:
        return fields_page(app.openapi())

    @app.get("/health")
    async def health() -> Response:
        """200 when requests are answered; 503 while loading, while draining, after a failure."""
        return _document({"status": state.health}, 200 if state.health == "ready" else 503)

    @app.get("/version")
    async def version() -> Response:
        return _document({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        body, kind = await state.rendered_metrics()
        return Response(body, headers={"content-type": kind})


def _document(document: Any, status: int = 200) -> Response:
    return _json(encoded(document), status)


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path[:80]}: {error.detail}."
        error = no_such_route(error.status_code, message, error.headers or {})
    refusal = refusal_of(error)
    note_of(request.scope).error = refusal.message
    return Response(
        encoded(refusal.body), refusal.status, refusal.headers, media_type="application/json"
    )


class Keys:
    """The keys of a server; without any, all clients may ask."""

    def __init__(self, keys: Sequence[str]):
        self._digests = [_digest(key) for key in keys]

    def check(self, authorization: str | None) -> None:
        """Refusal unless the header holds one of the keys."""
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise _refused("this server wants an API key: `Authorization: Bearer KEY`.")
        # All are compared, and digests of equal length: time says nothing about any of them.
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise _refused("the API key is not one of this server's.")


def check_site(headers: Mapping[str, str], allowed: Sequence[str]) -> None:
    """Refusal for a web page of another origin, which browsers say.

    CORS keeps such a page from reading the answer; this keeps it from making the model work.
    """
    origin = headers.get("origin")
    is_foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
    if origin is not None:
        is_foreign |= origin.partition("://")[2].lower() != headers.get("host", "").lower()
    if is_foreign and "*" not in allowed and origin not in allowed:
        raise Refusal(
            403, f"pages of {(origin or 'another origin')[:80]} may not ask this server; "
            "--cors-origin allows one.", code="foreign_origin",
        )  # fmt: skip


def check_host(host: str, own: str) -> None:
    """Refusal unless a server for this machine is asked under a name of this machine.

    A page of any name can let that name lead to this machine, and is of the server's own origin
    then.
    """
    name = host.lower() if host.endswith("]") else host.lower().rpartition(":")[0] or host.lower()
    is_own = name in ("", "localhost", "[::1]", own.lower(), f"[{own.lower()}]")
    if not is_own and not _LOOPBACK.fullmatch(name):
        raise Refusal(
            403, f"the Host is {host[:80]!r} and this server is for this machine; ask localhost, "
            "start it with another --host, or with --api-key.", code="foreign_host",
        )  # fmt: skip


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _refused(message: str) -> Refusal:
    return Refusal(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
