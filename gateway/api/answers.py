"""``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio
from anyio import to_thread
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from gateway.answer.reader import AnswerReader
from gateway.api.access import require_key
from gateway.api.body import parse_object, read_body
from gateway.api.context import AppState
from gateway.api.errors import ApiError, model_not_found
from gateway.api.generation import ClientGone, Generation, stream_answer, unless_gone, whole_answer
from gateway.api.sse import EventStream
from gateway.engine.grammar import Grammar, GrammarError
from gateway.engine.types import CacheReport, GenerationRequest
from gateway.protocol.errors import InvalidRequest
from gateway.protocol.logprobs import BytesOf
from gateway.protocol.requests import ChatRequest, CompletionRequest, SamplingFields
from gateway.protocol.responses import AnswerFormat, AnswerHead, ChatFormat, CompletionFormat
from gateway.protocol.structured import Structure

router = APIRouter(dependencies=[Depends(require_key)])

#: nginx's status for a client that closed the connection; nobody receives it, counters do.
_CLIENT_CLOSED = 499

#: Rendering and encoding a prompt that fits any context takes far less.
_PREPARE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is understood: its prompts as token ids, and how its answer is written."""

    asked: SamplingFields
    prompts: list[list[int]]
    id_prefix: str
    form: Callable[[AnswerHead], AnswerFormat]
    prompt_param: str
    reader: Callable[[], AnswerReader] = AnswerReader
    grammar: Grammar | None = None
    shown_tokens: frozenset[int] = frozenset()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    return await _complete(request, "/chat/completions", _prepare_chat)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    return await _complete(request, "/completions", prepare_completion)


async def _complete(
    request: Request, path: str, prepare: Callable[[AppState, Mapping[str, Any]], Prepared]
) -> Response:
    state = AppState.of(request)
    raw = await read_body(request, state.settings.server.max_body_bytes)
    body = parse_object(raw)
    try:
        if _is_forwarded(state, body.get("model")):
            assert state.upstream is not None
            return await unless_gone(request, state.upstream.forward(path, raw))
        prepared = await _in_prompt_thread(state, prepare, body)
        return await _answer(state, request, prepared)
    except ClientGone:
        return Response(status_code=_CLIENT_CLOSED)


async def read_request(request: Request) -> dict[str, Any]:
    """The body as one JSON object. Raises ApiError."""
    return parse_object(await read_body(request, AppState.of(request).settings.server.max_body_bytes))


def _is_forwarded(state: AppState, model: Any) -> bool:
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


async def _in_prompt_thread(
    state: AppState, prepare: Callable[[AppState, Mapping[str, Any]], Prepared], body: Mapping[str, Any]
) -> Prepared:
    try:
        with anyio.fail_after(_PREPARE_SECONDS):
            return await to_thread.run_sync(prepare, state, body, abandon_on_cancel=True, limiter=state.prompt_threads)
    except TimeoutError:
        raise ApiError(
            503,
            f"the prompt was not ready after {_PREPARE_SECONDS:.0f} s; shorten it or retry later",
            code="prompt_timeout",
        ) from None


def _prepare_chat(state: AppState, body: Mapping[str, Any]) -> Prepared:
    asked = ChatRequest.parse(body)
    bytes_of = _bytes_of(state, asked)
    dialect, use = state.dialect, asked.tool_use
    prompt = state.encoder.encode_chat(asked)
    opened = dialect.thinks and state.encoder.ends_in_thought(asked, prompt)

    def reader() -> AnswerReader:
        return AnswerReader(
            bytes_of=bytes_of,
            thoughts=dialect.splitter(opened=opened),
            tools=dialect.parser(use),
            call_id=dialect.call_id,
            parallel=use.parallel or bool(use.forced),
        )

    param = "tools" if use.forced or asked.structure is None else asked.structure.param
    spec = dialect.grammar(use, asked.structure.spec if asked.structure else None, opened=opened)
    return Prepared(
        asked,
        [prompt],
        "chatcmpl",
        lambda head: ChatFormat(head, bytes_of),
        "messages",
        reader,
        _grammar(state, Structure(param, spec) if spec else None),
        dialect.shown_tokens(use),
    )


def prepare_completion(state: AppState, body: Mapping[str, Any]) -> Prepared:
    asked = CompletionRequest.parse(body)
    prompts = [_prompt_ids(state, prompt) for prompt in asked.prompt]
    echoed = [
        prompt if isinstance(prompt, str) else state.encoder.decode(prompt)
        for prompt in asked.prompt
        for _ in range(asked.choices)
        if asked.echo
    ]
    bytes_of = _bytes_of(state, asked)
    return Prepared(
        asked,
        prompts,
        "cmpl",
        lambda head: CompletionFormat(head, echoed, bytes_of, top_logprobs=bool(asked.logprobs)),
        "prompt",
        lambda: AnswerReader(bytes_of=bytes_of),
        _grammar(state, asked.structure),
    )


def _grammar(state: AppState, structure: Structure | None) -> Grammar | None:
    """The compiled grammar of what the client asked for.

    Raises:
        InvalidRequest: it is malformed, too large or too complex.
    """
    if structure is None:
        return None
    try:
        return state.engine.compile_grammar(structure.spec)
    except GrammarError as error:
        raise InvalidRequest(f"{structure.param}: {error}", structure.param, error.code) from None


def _bytes_of(state: AppState, asked: SamplingFields) -> BytesOf | None:
    """What log-probabilities are written with, where the client asked for them."""
    return None if asked.logprob_count is None else state.encoder.token_bytes.of


def _prompt_ids(state: AppState, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        return state.encoder.encode_completion(prompt)
    size = state.engine.vocab_size
    if wrong := [token for token in prompt if not 0 <= token < size]:
        raise ApiError(400, f"prompt: token {wrong[0]} is not in the vocabulary (0..{size - 1})", param="prompt")
    return prompt


async def _answer(state: AppState, request: Request, prepared: Prepared) -> Response:
    asked = prepared.asked
    answer_id = f"{prepared.id_prefix}-{secrets.token_hex(12)}"
    generation = Generation(state.engine, _requests(state, request, prepared, answer_id), asked.choices)
    head = AnswerHead(
        id=answer_id,
        created=int(time.time()),
        model=asked.model or state.engine.model_id,
        usage_in_stream=asked.streams and asked.includes_usage,
    )
    form = prepared.form(head)
    try:
        await unless_gone(request, generation.start())
        headers = {"x-prefix-cache": cache_header(generation.cache)}
        if asked.streams:
            # From here on the response owns the generation, and closes it however it ends.
            events = stream_answer(generation, form, include_usage=asked.includes_usage, reader=prepared.reader)
            return EventStream(events, generation.close, headers)
        choices = await unless_gone(request, whole_answer(generation, prepared.reader))
    except BaseException:
        await generation.close()
        raise
    return JSONResponse(form.whole(choices, generation.usage), headers=headers)


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
