"""The one way of a request through the server, whichever door it came in by."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import anyio
from anyio import to_thread
from fastapi import Request, Response
from fastapi.responses import JSONResponse

from gateway.api.body import read_object
from gateway.api.context import AppState
from gateway.api.errors import ApiError, model_not_found
from gateway.api.generation import ClientGone, Generation, answer_chunks, unless_gone, whole_answer
from gateway.api.prepare import Prepared
from gateway.api.sse import DONE, PING, EventStream, event
from gateway.engine.types import CacheReport, GenerationRequest
from gateway.protocol.responses import AnswerHead

T = TypeVar("T")

#: nginx's status for a client that closed the connection; nobody receives it, counters do.
CLIENT_CLOSED = 499

#: Rendering and encoding a prompt that fits any context takes far less.
_PREPARE_SECONDS = 60.0


class Writer(Protocol):
    """Puts one answer on the wire in a door's own shape, from the bodies that chat completions have."""

    ping: bytes  # sent while a stream is silent

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]: ...

    def events(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncGenerator[bytes, None]:
        """Server-sent events of a streamed answer; whatever ``chunks`` raises becomes the last of them."""
        ...


class OpenAIWriter:
    """The bodies as they are, ``[DONE]`` last."""

    ping = PING

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        return answer

    async def events(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncGenerator[bytes, None]:
        try:
            async for chunk in chunks:
                yield event(chunk)
        except Exception as error:
            yield event(ApiError.of(error).body)
        yield DONE


@dataclass(frozen=True, slots=True)
class Door:
    """An endpoint that makes answers.

    Args:
        path: under ``/v1``, here and at the upstream.
        prepare: understands a body, on a thread.
        writer: writes the answer of a generation.
        ends_with_done: whether its streams end with ``[DONE]``.
    """

    path: str
    prepare: Callable[[AppState, Mapping[str, Any]], Prepared]
    writer: Callable[[AnswerHead, Generation], Writer] = lambda *_: OpenAIWriter()
    ends_with_done: bool = True


async def complete(request: Request, door: Door) -> Response:
    """Answer a request, or forward it.

    Raises:
        ApiError, InvalidRequest, PromptError, EngineError: it can't be answered.
    """
    state = AppState.of(request)
    raw, body = await read_object(request, state.settings.limits)
    try:
        if is_forwarded(state, body.get("model")):
            return await forward(request, door.path, raw, ends_with_done=door.ends_with_done)
        prepared = await in_prompt_thread(state, lambda: door.prepare(state, body))
        return await _answer(state, request, door, prepared)
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED)


async def forward(request: Request, path: str, raw: bytes, *, ends_with_done: bool = True) -> Response:
    """The upstream's answer. Raises ApiError, ClientGone."""
    state = AppState.of(request)
    assert state.upstream is not None
    sent = state.upstream.forward(path, raw, ends_with_done=ends_with_done)
    return await unless_gone(request, sent, state.drain.expired)


async def read_request(request: Request) -> dict[str, Any]:
    """The body as one JSON object. Raises ApiError."""
    return (await read_object(request, AppState.of(request).settings.limits))[1]


def is_forwarded(state: AppState, model: Any) -> bool:
    """Whether the upstream has this model; no model means the local one.

    Raises:
        ApiError: 404, nobody has it.
    """
    if model is None:
        return False
    if not isinstance(model, str):
        raise ApiError(400, "model must be a string; GET /v1/models lists the models", param="model")
    if state.is_local(model):
        return False
    if not model or state.upstream is None:
        raise model_not_found(model)
    return True


async def in_prompt_thread(state: AppState, work: Callable[[], T]) -> T:
    """Run what renders and encodes prompts, a few at a time. Raises ApiError (503) when it takes too long."""
    try:
        with anyio.fail_after(_PREPARE_SECONDS):
            return await to_thread.run_sync(work, abandon_on_cancel=True, limiter=state.prompt_threads)
    except TimeoutError:
        raise ApiError(
            503,
            f"the prompt was not ready after {_PREPARE_SECONDS:.0f} s; shorten it or retry later",
            code="prompt_timeout",
        ) from None


async def _answer(state: AppState, request: Request, door: Door, prepared: Prepared) -> Response:
    asked, settings = prepared.asked, state.settings
    answer_id = f"{prepared.id_prefix}{secrets.token_hex(12)}"
    generation = Generation(
        state.engine,
        _requests(state, request, prepared, answer_id),
        asked.choices,
        max_wait_seconds=settings.limits.max_wait_seconds,
    )
    head = AnswerHead(
        id=answer_id,
        created=int(time.time()),
        model=asked.model or state.engine.model_id,
        usage_in_stream=asked.streams and asked.includes_usage,
    )
    form, writer = prepared.form(head), door.writer(head, generation)
    release = state.drain.on_expiry(generation.fail)

    async def close() -> None:
        release()
        await generation.close()

    try:
        headers = await _begin(request, generation, settings.server.ping_seconds if asked.streams else None)
        if asked.streams:
            # From here on the response owns the generation, and closes it however it ends.
            chunks = answer_chunks(generation, form, prepared.reader, include_usage=asked.includes_usage)
            return EventStream(
                writer.events(chunks), close, headers, ping_seconds=settings.server.ping_seconds, ping=writer.ping
            )
        choices = await unless_gone(request, whole_answer(generation, prepared.reader))
        body = writer.whole(form.whole(choices, generation.usage))
    except BaseException:
        await close()
        raise
    release()
    return JSONResponse(body, headers=headers)


async def _begin(request: Request, generation: Generation, patience: float | None) -> dict[str, str]:
    """Start, and tell what was cached. A request that queues longer than ``patience`` seconds is not told.

    A refusal that comes in time keeps its HTTP status; after that a client must see that somebody is there.
    """
    try:
        async with asyncio.timeout(patience):
            await unless_gone(request, generation.start())
    except TimeoutError:
        return {}
    return {"x-prefix-cache": cache_header(generation.cache)}


def _requests(state: AppState, request: Request, prepared: Prepared, answer_id: str) -> list[GenerationRequest]:
    """One an answer, prompt by prompt.

    Raises:
        ApiError: 400, a prompt leaves no room for an answer.
    """
    asked, engine = prepared.asked, state.engine
    namespace = state.namespaces.of(request.state.credential, asked.cache_salt)
    requests: list[GenerationRequest] = []
    for ids in prepared.prompts:
        room = engine.max_model_len - len(ids)
        if room < 1:
            raise ApiError(
                400,
                f"this model's maximum context length is {engine.max_model_len} tokens, but the prompt has {len(ids)}; "
                f"shorten it to {engine.max_model_len - 1} or less",
                code="context_length_exceeded",
                param=prepared.prompt_param,
            )
        for choice in range(asked.choices):
            sampling = asked.sampling(room=room, vocab_size=engine.vocab_size, choice=choice)
            request_id = f"{answer_id}-{len(requests)}"
            requests.append(
                GenerationRequest(
                    request_id,
                    ids,
                    sampling,
                    namespace,
                    grammar=prepared.grammar,
                    shown_tokens=prepared.shown_tokens,
                    pin_seconds=asked.retention_seconds,
                )
            )
    for each in requests:
        state.metrics.requests.name(each.request_id, request.state.request_id)
    return requests


def cache_header(cache: CacheReport) -> str:
    """``hit; tokens=...; gpu=...; cpu=...; disk=...``."""
    outcome = "hit" if cache.cached_tokens else "miss"
    return f"{outcome}; tokens={cache.cached_tokens}; gpu={cache.gpu}; cpu={cache.cpu}; disk={cache.disk}"
