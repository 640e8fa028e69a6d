"""Routes for people and programs that run the server: health, load, settings, metrics, the page."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from headstart import __version__
from headstart.server.answer_schemas import answered
from headstart.server.api_docs import fields_page
from headstart.server.page import page_response
from headstart.server.refusals import Refusal
from headstart.server.state import ServerState
from headstart.server.wire import encoded

_TEXT = {"text/plain": {"schema": {"type": "string"}}}
_METRICS = {"responses": {"200": {"description": "answered", "content": _TEXT}}}
_NOT_SHOWN = (  # keys, and places on this machine
    "api_key", "chat_template", "draft_vocab", "host", "port", "push_key_file", "ssl_certfile",
    "ssl_keyfile",
)  # fmt: skip


def add_operation(app: FastAPI, state: ServerState, keys: list[Any]) -> None:
    """`keys`: what a request for the model must bring."""

    @app.get("/", include_in_schema=False)
    @app.head("/", include_in_schema=False, name="page_head")
    async def page() -> Response:
        return page_response()

    @app.get("/docs", include_in_schema=False)
    async def fields() -> Response:
        return fields_page(app.openapi())

    async def health() -> Response:
        """200 when requests are answered; 503 while loading, while draining, after a failure."""
        return document_response({"status": state.health}, 200 if state.health == "ready" else 503)

    app.get("/health", openapi_extra=answered("Health"))(health)
    app.head("/health", include_in_schema=False)(health)
    app.head("/ping", include_in_schema=False, name="ping_head")(health)
    app.get("/ping", openapi_extra=answered("Health"), name="ping")(health)
    app.post("/ping", include_in_schema=False, name="ping_by_post")(health)

    @app.get("/load", openapi_extra=answered("Load"))
    async def load() -> Response:
        """Answers that are running or waiting."""
        return document_response({"server_load": state.gate.num_open})

    @app.get("/version", openapi_extra=answered("Version"))
    async def version() -> Response:
        """The version of Headstart."""
        return document_response({"version": __version__})

    @app.get("/metrics", openapi_extra=_METRICS, response_class=Response)
    async def metrics() -> Response:
        """All metrics, in Prometheus' text format."""
        body, kind = await state.rendered_metrics()
        return Response(body, headers={"content-type": kind})

    @app.get("/server_info", dependencies=keys, openapi_extra=answered("ServerInfo"))
    async def server_info() -> Response:
        """Version, names, and the settings that the server and its engine run with."""
        state.gate.check()
        engine = state.model.engine
        return document_response(
            {
                "version": __version__, "models": list(state.names),
                "engine": _settings(engine.options), "server": _settings(state.options),
                "max_model_len": state.model.max_len, "head_version": engine.head_version,
            }
        )  # fmt: skip

    @app.get("/tokenizer_info", dependencies=keys, openapi_extra=answered("TokenizerInfo"))
    async def tokenizer_info() -> Response:
        """Special tokens and the chat template, as lm-eval reads them."""
        state.gate.check()
        return document_response(state.model.tokenizer_info())

    @app.post("/reset_prefix_cache", dependencies=keys, openapi_extra=answered("Empty"))
    async def reset_prefix_cache() -> Response:
        """Forget cached beginnings of prompts, where --allow-cache-reset lets clients do it.

        Those that a running request holds stay with it.
        """
        state.gate.check()
        if not state.options.allow_cache_reset:
            raise Refusal(
                403, "the cache of prompts is shared by all clients (this server was started "
                "without --allow-cache-reset). Leave it as it is.",
            )  # fmt: skip
        await state.worker.call(lambda engine: engine.pool.drop_cache())
        return document_response({})


def _settings(options: Any) -> dict[str, Any]:
    """Options as JSON; neither keys nor places on this machine."""
    found = dataclasses.asdict(options)
    return {
        name: value if isinstance(value, bool | int | float | list | None) else str(value)
        for name, value in found.items()
        if name not in _NOT_SHOWN
    }


def document_response(document: Any, status: int = 200) -> Response:
    return json_response(encoded(document), status)


def json_response(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")
