"""The app: wiring and lifespan."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI

from gateway.answer.dialect import Dialect
from gateway.api import answers, cache, embeddings, errors, health, messages, models, openapi, responses, tokens
from gateway.api.context import AppState
from gateway.api.cors import CrossOrigin
from gateway.api.drain import Drain
from gateway.api.kept import KeptResponses
from gateway.api.middleware import NormalisePath, RequestContext
from gateway.auth.keys import KeyCheck
from gateway.auth.namespace import Namespaces
from gateway.config import Settings
from gateway.engine.protocol import EngineProtocol
from gateway.observe.metrics import Metrics
from gateway.prompt.encode import PromptEncoder
from gateway.upstream.client import Upstream


def create_app(settings: Settings, engine: EngineProtocol, metrics: Metrics) -> FastAPI:
    """The server for one engine. Its lifespan starts and closes the engine and the upstream's connections."""
    server, limits = settings.server, settings.limits
    drain = Drain(server.shutdown_seconds)
    upstream = None
    if server.api_base:
        upstream = Upstream(
            server.api_base, server.api_key, metrics, ping_seconds=server.ping_seconds, expired=drain.expired
        )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if upstream is not None:
                stack.push_async_callback(upstream.close)
            await engine.start()
            stack.push_async_callback(engine.close)
            yield

    app = FastAPI(title="kvgate", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    app.state.shared = AppState(
        settings=settings,
        engine=engine,
        encoder=PromptEncoder(engine.tokenizer, settings.prefix_cache.normalise),
        dialect=Dialect.of(engine.tokenizer, settings.model.tool_parser, settings.model.reasoning_parser),
        metrics=metrics,
        keys=KeyCheck(server.api_key),
        namespaces=Namespaces(settings.prefix_cache.namespace),
        upstream=upstream,
        drain=drain,
        kept=KeptResponses(limits.max_responses, int(limits.responses_mb * 2**20), limits.response_seconds),
    )
    metrics.watch(engine)
    errors.install(app)
    for door in (health, models, answers, messages, responses, cache, tokens, embeddings):
        app.include_router(door.router)
    openapi.install(app)
    app.add_middleware(RequestContext, metrics=metrics, drain=drain)
    app.add_middleware(NormalisePath)
    if server.cors_origins:
        app.add_middleware(CrossOrigin, origins=server.cors_origins)
    return app
